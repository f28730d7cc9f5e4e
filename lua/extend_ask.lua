#!lua flags=allow-oom
--[[
extend_ask: whoever asks providers about a job keeps the right to, or leaves it standing until the next question is due.

One gateway asks at a time, and one at a time renews the certificate of a route and provider, by a lease of the same kind. It is
taken with SET NX PX and never given up: its last extension is the pause before the next question, so nobody asks earlier, however
often somebody looks at the job. A gateway that dies while it asks lets it lapse.

Sent again, it extends the same lease again.

KEYS
  [1] ask     STRING, the token of whoever asks about the job, or renews the certificate
ARGV
  [1] token     16 bytes, that it was taken with
  [2] lease_ms  from now
REPLY { status, script, token }
  extended    it lasts that long from now
  lost        it lapsed, or is somebody else's; nothing changed
WRITES the lease's time to live, once, if the reply is "extended"
COST   O(1)
]]
ECHO = ARGV[1]
local lease = number_of(ARGV[2], 'lease_ms')
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return reply('lost')
end
redis.call('PEXPIRE', KEYS[1], text(lease))
return reply('extended')
