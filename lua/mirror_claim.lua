#!lua
--[[
mirror_claim: keep ids of a batch from everybody else for a lease, without remembering them yet, for a caller with a copy.

A claim is the same thing as one of dedup_claim; what the caller's copy has, and how far it must reach, the same as for mirror_batch.

Sent again before its lease has lapsed, it is answered with what it was told and changes nothing. One that failed half way finds its
own claims, which count as first.

KEYS
  [1] shard     STRING, as mirror_batch has it
  [2] verdicts  STRING, those of this call: its fingerprint, and a verdict an id
  [3] claims    HASH, id → the claim's token, and until when it stands, in ms
  [4] lapses    ZSET, id → until when its claim stands, in ms
ARGV
  [1] echo         16 bytes, the call's own token
  [2] fingerprint  16 bytes, of all ids of the batch
  [3] window_ms    1 or more
  [4] slice_ms     1 or more
  [5] lease_ms     how long the claims stand, 1 or more
  [6] claim        16 bytes, the batch's token
  [7] chunk        up to which the caller has read; 0 if it has read nothing
  [8] offset       how many bytes of it
  [9] digest       12 bytes, of everything up to there
  [10] oldest      the oldest chunk that one of the caller's duplicates is in, 0 if there are none
  [11] verdicts    the caller's: of each id of this call 0 if its copy has it, else 1
  [12] ids         10 bytes each, those with a 1
REPLY { status, script, echo, detail… }
  claimed, verdicts    of each id: 1 for the first time, and claimed; 0 for a duplicate; 2 for one that somebody else has claimed
  behind, oldest       the caller must read first; nothing changed
  repeated, verdicts   the same, as an earlier call with this token was told them
  conflict             an earlier call with this token had other ids; nothing changed
WRITES the claims and when they lapse, then the verdicts, if the reply is "claimed"; lapsed claims are taken away with them
COST   O(bytes of the tail + ids × log claims)
]]
ECHO = ARGV[1]
local fingerprint, claim, verdicts, ids = ARGV[2], ARGV[6], ARGV[11], ARGV[12]
local window, slice_ms, lease = number_of(ARGV[3], 'window_ms'), number_of(ARGV[4], 'slice_ms'), number_of(ARGV[5], 'lease_ms')
local chunk, offset, oldest = number_of(ARGV[7], 'chunk'), number_of(ARGV[8], 'offset'), number_of(ARGV[10], 'oldest')
mirror_arguments(fingerprint, verdicts, ids, ARGV[9])
if #claim ~= 16 or window < 1 or slice_ms < 1 or lease < 1 then
  fault('BADARG', 'claim is 16 bytes; window_ms, slice_ms and lease_ms are 1 or more')
end
local kept = redis.call('GET', KEYS[2])
if kept then
  if string.sub(kept, 1, 16) ~= fingerprint then
    return reply('conflict')
  end
  return reply('repeated', string.sub(kept, 17))
end
local now = clock()
local shard, _, tail = mirror_open(KEYS[1], now, window, slice_ms, chunk, offset, ARGV[9], oldest)
if not tail then
  return reply('behind', text(shard[M.chunks][1][C.number]))
end
local found = mirror_finder(tail, ids)
local records, holders = dedup_holders(KEYS[3], ids, MIRROR_ID_BYTES, now)
local fields, scores = {}, {}
verdicts = mirror_without(verdicts, ids, function(id, n)
  if found(id) then
    return '0'
  elseif holders[n] and holders[n] ~= claim then
    return '2'
  end
  fields[#fields + 1], fields[#fields + 2] = records[n], claim .. text(now + lease)
  scores[#scores + 1], scores[#scores + 2] = text(now + lease), records[n]
end)
dedup_hold(KEYS[3], KEYS[4], fields, scores, now, lease)
redis.call('SET', KEYS[2], fingerprint .. verdicts, 'PX', text(lease))
return reply('claimed', verdicts)
