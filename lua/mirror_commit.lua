#!lua flags=allow-oom
--[[
mirror_commit: remember ids that were claimed, and say which of them are lost, for a caller with a copy.

What is lost is the same as for dedup_commit; what the caller's copy has, and how far it must reach, as for mirror_batch. It runs while
Redis is out of memory: the clicks have been counted.

Sent again while its verdicts are kept, it is answered with them and changes nothing.

KEYS
  [1] shard     STRING, as mirror_batch has it, which also says how the STRINGs of its log are called
  [2] verdicts  STRING, those of this call: its fingerprint, and a verdict an id
  [3] claims    HASH, id → the claim's token, and until when it stands, in ms
  [4] lapses    ZSET, id → until when its claim stands, in ms
ARGV
  [1] echo         16 bytes, the call's own token
  [2] fingerprint  16 bytes, of all ids of the batch
  [3] window_ms    1 or more
  [4] slice_ms     1 or more
  [5] keep_ms      how long the verdicts are kept, 1 or more
  [6] claim        16 bytes, the token of the claim
  [7] chunk        up to which the caller has read; 0 if it has read nothing
  [8] offset       how many bytes of it
  [9] digest       12 bytes, of everything up to there
  [10] oldest      the oldest chunk that one of the caller's duplicates is in, 0 if there are none
  [11] verdicts    the caller's: of each id of this call 0 if its copy has it, else 1
  [12] ids         10 bytes each, those with a 1
REPLY { status, script, echo, detail… }
  committed, verdicts, oldest, chunk, offset, digest, tail   of each id: 1 if it is remembered for this claim, 0 if it is lost; the
                       rest as mirror_batch has it
  behind, oldest       the caller must read first; nothing changed
  repeated, verdicts   the same, as an earlier call with this token was told them
  conflict             an earlier call with this token had other ids; nothing changed
WRITES the running chunk, the claims that are over, the verdicts, then the shard, if the reply is "committed"
COST   O(bytes of the tail and of the ids + ids × log claims)
]]
ECHO = ARGV[1]
local fingerprint, claim, verdicts, ids = ARGV[2], ARGV[6], ARGV[11], ARGV[12]
local window, slice_ms, keep = number_of(ARGV[3], 'window_ms'), number_of(ARGV[4], 'slice_ms'), number_of(ARGV[5], 'keep_ms')
local chunk, offset, oldest = number_of(ARGV[7], 'chunk'), number_of(ARGV[8], 'offset'), number_of(ARGV[10], 'oldest')
mirror_arguments(fingerprint, verdicts, ids, ARGV[9])
if #claim ~= 16 or window < 1 or slice_ms < 1 or keep < 1 then
  fault('BADARG', 'claim is 16 bytes; window_ms, slice_ms and keep_ms are 1 or more')
end
local kept = redis.call('GET', KEYS[2])
if kept then
  if string.sub(kept, 1, 16) ~= fingerprint then
    return reply('conflict')
  end
  return reply('repeated', string.sub(kept, 17))
end
local now = clock()
local shard, told, tail = mirror_open(KEYS[1], now, window, slice_ms, chunk, offset, ARGV[9], oldest)
if not tail then
  return reply('behind', text(shard[M.chunks][1][C.number]))
end
local found = mirror_finder(tail, ids)
local records, holders = dedup_holders(KEYS[3], ids, MIRROR_ID_BYTES, now)
local mine = {}
verdicts, ids = mirror_without(verdicts, ids, function(id, n)
  if holders[n] == claim then
    mine[#mine + 1] = records[n]
  end
  return (found(id) or (holders[n] and holders[n] ~= claim)) and '0'
end)
local began = shard[M.chunks][#shard[M.chunks]][C.bytes]
mirror_remember(KEYS[1], KEYS[2], fingerprint, shard, told, window, keep, verdicts, ids, function()
  if #mine > 0 then
    redis.call('HDEL', KEYS[3], unpack(mine))
    redis.call('ZREM', KEYS[4], unpack(mine))
  end
end)
return reply('committed', verdicts, mirror_news(shard, began, tail))
