#!lua flags=allow-oom
--[[
postpone_job: say why a pending job waits, and until when, without an attempt.

What keeps it is our own protection of its providers: nothing was tried, so nothing is counted. A wait that would end beyond the
deadline ends the job at once, as one that a provider asked for does.

A caller that lost our reply sends the same call again and is answered "repeated".

KEYS
  [1] job     STRING, the record (docs/PROTOCOL.md)
ARGV
  [1] job_id    16 bytes, of this incarnation; another one answers "not_found"
  [2] token     16 bytes, new for each call
  [3] holder    16 bytes: the token that holds the pending job; '' for a caller that holds nothing
  [4] delay_ms  from now
  [5] reason    text
REPLY { status, script, token, detail… }
  postponed, next_at_ms   nobody begins before that; then whoever has room may
  repeated, next_at_ms    an earlier call with this token did the same
  too_early, ms           a delay, or another holder's lease, has so long to run: nothing is to be said yet
  begun                   an attempt is open: it does not wait
  canceling               somebody asked to cancel it
  ended, state            it has ended, perhaps by this call
  not_found               no such job, or another incarnation
WRITES the record, once, if the reply is "postponed", or "ended" by this call
COST   O(attempts)
]]
local token, holder, reason = ARGV[2], ARGV[3], ARGV[5]
ECHO = token
if #token ~= 16 then
  fault('BADARG', 'token is 16 bytes')
end
local delay = number_of(ARGV[4], 'delay_ms')
local record = read(KEYS[1], ARGV[1])
if not record then
  return reply('not_found')
end
if ended(record) then
  return reply('ended', record[P.state])
end
if record[P.canceled_by] ~= '' then
  return reply('canceling')
end
if census(record).open > 0 then
  return reply('begun')
end
if record[P.holder] == token then
  return reply('repeated', text(record[P.next_at_ms]))
end
local now = clock(record)
local free_at = record[P.next_at_ms]
if record[P.holder] ~= holder then
  free_at = math.max(free_at, record[P.holder_lease_ms])
end
if free_at > now and (record[P.holder] ~= holder or holder == '') then
  return reply('too_early', text(free_at - now))
end
local why = deadline_passed(record, now + delay) and reason .. '; deadline' or reason
settle(record, now, { mode = 'retry', delay_ms = delay, lease_ms = 0, holder = token }, why)
if not ended(record) then
  record[P.reason] = reason
end
write(KEYS[1], record, now)
if ended(record) then
  return reply('ended', record[P.state])
end
return reply('postponed', text(record[P.next_at_ms]))
