#!lua flags=allow-oom
--[[
settle_hint: move or remove a hint, unless somebody has moved it since.

A hint says when to look at a job; it is never the truth about it. Comparing the score before touching it keeps a slow gateway from
taking away the hint of a job that has meanwhile begun anew.

Sent again, it finds another score and does nothing.

KEYS
  [1] hint    ZSET, identity → when to look, in ms
ARGV
  [1] identity
  [2] seen_ms   the score that the caller saw
  [3] due_ms    the new score; 0 to remove the hint
REPLY { status, script, identity }
  settled     moved or removed
  moved       somebody else was faster; nothing changed
WRITES the hint, once, if the reply is "settled"
COST   O(log hints)
]]
ECHO = ARGV[1]
local seen, due = number_of(ARGV[2], 'seen_ms'), number_of(ARGV[3], 'due_ms')
local score = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not score or tonumber(score) ~= seen then
  return reply('moved')
end
if due == 0 then
  redis.call('ZREM', KEYS[1], ARGV[1])
else
  redis.call('ZADD', KEYS[1], text(due), ARGV[1])
end
return reply('settled')
