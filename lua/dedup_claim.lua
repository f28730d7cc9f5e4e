#!lua
--[[
dedup_claim: keep ids of a batch from everybody else for a lease, without remembering them yet.

For whoever can die between being told and having written down: an id that is claimed and not committed is free again when its lease
has lapsed, and the click counts then. A claim of somebody else that stands makes an id neither first nor duplicate.

Sent again before its lease has lapsed, it is answered with what it was told and changes nothing. One that failed half way finds its
own claims, which count as first.

KEYS
  [1] shard     STRING, as dedup_batch has it
  [2] verdicts  STRING, those of this call: its fingerprint, and a verdict an id
  [3] claims    HASH, id → the claim's token, and until when it stands, in ms
  [4] lapses    ZSET, id → until when its claim stands, in ms
ARGV
  [1] echo         16 bytes, the call's own token
  [2] fingerprint  16 bytes, of all ids of the batch
  [3] window_ms    1 or more
  [4] slice_ms     1 or more
  [5] expected     ids of a window in this shard, as long as none has told
  [6] lease_ms     how long the claims stand, 1 or more
  [7] claim        16 bytes, the batch's token
  [8] ids          31 bytes each, in order, as dedup_batch has them
REPLY { status, script, echo, detail… }
  claimed, verdicts    of each id: 1 for the first time, and claimed; 0 for a duplicate; 2 for one that somebody else has claimed
  repeated, verdicts   the same, as an earlier call with this token was told them
  conflict             an earlier call with this token had other ids; nothing changed
WRITES the claims and when they lapse, then the verdicts, if the reply is "claimed"; lapsed claims are taken away with them
COST   O(ids × generations + ids × log claims)
]]
ECHO = ARGV[1]
local fingerprint, claim, ids = ARGV[2], ARGV[7], ARGV[8]
local window, slice_ms = number_of(ARGV[3], 'window_ms'), number_of(ARGV[4], 'slice_ms')
local expected, lease = number_of(ARGV[5], 'expected'), number_of(ARGV[6], 'lease_ms')
if #fingerprint ~= 16 or #claim ~= 16 or window < 1 or slice_ms < 1 or lease < 1 or #ids == 0 or #ids % DEDUP_ID_BYTES ~= 0 then
  fault('BADARG', 'fingerprint and claim are 16 bytes, an id 31; window_ms, slice_ms and lease_ms are 1 or more')
end
local kept = redis.call('GET', KEYS[2])
if kept then
  if string.sub(kept, 1, 16) ~= fingerprint then
    return reply('conflict')
  end
  return reply('repeated', string.sub(kept, 17))
end
local now = clock()
local shard, told = dedup_shard(KEYS[1], now, window, slice_ms, expected)
local seen = {}
dedup_ids(KEYS[1], shard, told, window, ids, seen, 0, nil)
local records, holders = dedup_holders(KEYS[3], ids, DEDUP_ID_BYTES, now)
local verdicts, fields, scores = {}, {}, {}
for n = 1, #records do
  if seen[n] then
    verdicts[n] = '0'
  elseif holders[n] and holders[n] ~= claim then
    verdicts[n] = '2'
  else
    verdicts[n] = '1'
    fields[#fields + 1], fields[#fields + 2] = records[n], claim .. text(now + lease)
    scores[#scores + 1], scores[#scores + 2] = text(now + lease), records[n]
  end
end
dedup_hold(KEYS[3], KEYS[4], fields, scores, now, lease)
verdicts = table.concat(verdicts)
redis.call('SET', KEYS[2], fingerprint .. verdicts, 'PX', text(lease))
return reply('claimed', verdicts)
