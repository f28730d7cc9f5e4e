#!lua flags=allow-oom
--[[
dedup_release: give ids that were claimed back at once, so that they count for whoever comes next.

Only claims of this token that stand are taken away: what somebody else has claimed, or what is remembered, stays.

Sent again, it finds nothing and answers the same.

KEYS
  [1] claims   HASH, id → the claim's token, and until when it stands, in ms
  [2] lapses   ZSET, id → until when its claim stands, in ms
ARGV
  [1] echo    16 bytes, the call's own token
  [2] claim   16 bytes, the token of the claim
  [3] bytes   of an id: 31, or 10 in a mirrored stream
  [4] ids     as they were claimed
REPLY { status, script, echo }
  released    none of the ids is claimed by this token
WRITES the claims, then when they lapse
COST   O(ids × log claims)
]]
ECHO = ARGV[1]
local claim, bytes, ids = ARGV[2], number_of(ARGV[3], 'bytes'), ARGV[4]
if #claim ~= 16 or bytes < 1 or #ids == 0 or #ids % bytes ~= 0 then
  fault('BADARG', 'claim is 16 bytes; ids are so many bytes each')
end
local records, holders = dedup_holders(KEYS[1], ids, bytes, clock())
local mine = {}
for n = 1, #records do
  if holders[n] == claim then
    mine[#mine + 1] = records[n]
  end
end
if #mine > 0 then
  redis.call('HDEL', KEYS[1], unpack(mine))
  redis.call('ZREM', KEYS[2], unpack(mine))
end
return reply('released')
