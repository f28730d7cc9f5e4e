#!lua flags=allow-oom
--[[
extend_permits: a gateway says which of its permits it still uses, and which it gives back.

A permit that lapsed while its call went on counts again: the call is there, whatever the gateway did meanwhile.

Sent again, it extends a little further and gives back what is gone already.

KEYS
  [1] permits   ZSET, token → until when it is taken, in ms
ARGV
  [1] echo      16 bytes
  [2] kept      tokens of 16 bytes each, one after another
  [3] returned  the same
  [4] lease_ms  from now, 1 or more
REPLY { status, script, echo, detail… }
  extended, permits   permits taken now
WRITES the permits, last
COST   O(tokens × log permits); the caller sends a few hundred at most
]]
ECHO = ARGV[1]
local kept, returned, lease = ARGV[2], ARGV[3], number_of(ARGV[4], 'lease_ms')
if #kept % 16 ~= 0 or #returned % 16 ~= 0 or lease < 1 then
  fault('BADARG', 'tokens are 16 bytes each, lease_ms is 1 or more')
end
local now = clock()
for i = 1, #returned, 16 do
  redis.call('ZREM', KEYS[1], returned:sub(i, i + 15))
end
for i = 1, #kept, 16 do
  redis.call('ZADD', KEYS[1], 'GT', text(now + lease), kept:sub(i, i + 15))
end
if kept ~= '' and redis.call('PTTL', KEYS[1]) < lease then
  redis.call('PEXPIRE', KEYS[1], text(2 * lease))
end
return reply('extended', text(redis.call('ZCOUNT', KEYS[1], '(' .. text(now), '+inf')))
