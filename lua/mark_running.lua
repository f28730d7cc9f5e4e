#!lua flags=allow-oom
--[[
mark_running: the write-ahead. From here on the provider may have been touched.

Written before the first byte may leave. "fenced" means do not send: the token is not the attempt's, its lease has lapsed, the job
was canceled or has ended. A gateway that slept through its lease learns it here, before it can do harm.

A caller that lost our reply sends the same call again and is answered "repeated"; its own lease clock still decides whether it may
send.

KEYS
  [1] job     STRING, the record (docs/PROTOCOL.md)
ARGV
  [1] job_id        16 bytes, of this incarnation
  [2] number        of the attempt, from 1
  [3] token         16 bytes, that begin_attempt was given
  [4] url           the resolved URL, kept for status calls
  [5] request_hash  32 bytes
  [6] certificate   hash, '' for none
REPLY { status, script, token, detail… }
  running, lease_until_ms    send
  repeated, lease_until_ms   an earlier call with this token did the same
  fenced, why                do not send: token, state, lease, canceling or ended
  not_found                  no such job, or another incarnation
WRITES the record, once, if the reply is "running"
COST   O(attempts)
]]
local number, token = number_of(ARGV[2], 'number'), ARGV[3]
ECHO = token
local record = read(KEYS[1], ARGV[1])
if not record then
  return reply('not_found')
end
local attempt = attempt_of(record, number, token)
if not attempt then
  return reply('fenced', 'token')
end
if ended(record) then
  return reply('fenced', 'ended')
end
if record[P.canceled_by] ~= '' then
  return reply('fenced', 'canceling')
end
local now = clock(record)
if attempt[A.state] == 'running' and attempt[A.lease_ms] > now then
  return reply('repeated', text(attempt[A.lease_ms]))
end
if attempt[A.state] ~= 'starting' then
  return reply('fenced', attempt[A.state] == 'running' and 'lease' or 'state')
end
if attempt[A.lease_ms] <= now then
  return reply('fenced', 'lease')
end
attempt[A.state] = 'running'
attempt[A.url] = ARGV[4]
attempt[A.request_hash] = ARGV[5]
attempt[A.certificate] = ARGV[6]
write(KEYS[1], record, now)
return reply('running', text(attempt[A.lease_ms]))
