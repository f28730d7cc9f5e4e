#!lua flags=allow-oom
--[[
dedup_commit: remember ids that were claimed, and say which of them are lost.

A claim that lapsed costs nothing as long as nobody else took the id: it is remembered all the same. One that somebody else claimed or
had remembered meanwhile is lost, and the caller, who may have written the click down, has to take it back. It runs while Redis
is out of memory: the clicks have been counted.

Sent again while its verdicts are kept, it is answered with them and changes nothing; if it fails half way it takes back what it wrote.

KEYS
  [1] shard     STRING, as dedup_batch has it, which also says how the HASHes of the buckets are called
  [2] verdicts  STRING, those of this call: its fingerprint, and a verdict an id
  [3] claims    HASH, id → the claim's token, and until when it stands, in ms
  [4] lapses    ZSET, id → until when its claim stands, in ms
ARGV
  [1] echo         16 bytes, the call's own token
  [2] fingerprint  16 bytes, of all ids of the batch
  [3] window_ms    1 or more
  [4] slice_ms     1 or more
  [5] expected     ids of a window in this shard, as long as none has told
  [6] keep_ms      how long the verdicts are kept, 1 or more
  [7] claim        16 bytes, the token of the claim
  [8] ids          31 bytes each, in order, as dedup_batch has them
REPLY { status, script, echo, detail… }
  committed, verdicts  of each id: 1 if it is remembered for this claim, 0 if it is lost
  repeated, verdicts   the same, as an earlier call with this token was told them
  conflict             an earlier call with this token had other ids; nothing changed
WRITES the buckets of the ids, the shard, the verdicts, then the claims that are over, if the reply is "committed"
COST   O(ids × generations + ids × log claims)
]]
ECHO = ARGV[1]
local fingerprint, claim, ids = ARGV[2], ARGV[7], ARGV[8]
local window, slice_ms = number_of(ARGV[3], 'window_ms'), number_of(ARGV[4], 'slice_ms')
local expected, keep = number_of(ARGV[5], 'expected'), number_of(ARGV[6], 'keep_ms')
if #fingerprint ~= 16 or #claim ~= 16 or window < 1 or slice_ms < 1 or keep < 1 or #ids == 0 or #ids % DEDUP_ID_BYTES ~= 0 then
  fault('BADARG', 'fingerprint and claim are 16 bytes, an id 31; window_ms, slice_ms and keep_ms are 1 or more')
end
local kept = redis.call('GET', KEYS[2])
if kept then
  if string.sub(kept, 1, 16) ~= fingerprint then
    return reply('conflict')
  end
  return reply('repeated', string.sub(kept, 17))
end
local now = clock()
local records, holders = dedup_holders(KEYS[3], ids, DEDUP_ID_BYTES, now)
local seen, mine = {}, {}
for n = 1, #records do
  if holders[n] == claim then
    mine[#mine + 1] = records[n]
  elseif holders[n] then
    seen[n] = true
  end
end
local verdicts = dedup_remember(KEYS[1], KEYS[2], fingerprint, now, window, slice_ms, expected, keep, ids, seen, function()
  if #mine > 0 then
    redis.call('HDEL', KEYS[3], unpack(mine))
    redis.call('ZREM', KEYS[4], unpack(mine))
  end
end)
return reply('committed', verdicts)
