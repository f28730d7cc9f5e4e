#!lua
--[[
reopen_job: an operator gives a failed job new attempts.

Only a definite failure can be reopened, so nothing that may have happened happens twice. The version grows: an attempt from before
can no longer claim the result.

A caller that lost our reply sends the same request id again and is answered "reopened" again.

KEYS
  [1] job     STRING, the record (docs/PROTOCOL.md)
ARGV
  [1] job_id       16 bytes, of this incarnation
  [2] request_id   text, new for each request
  [3] actor        text, who reopens
  [4] reason       text, why
  [5] attempts     how many more, 1 or more; with those made, at most 1000
  [6] deadline_ms  from now; 0 for none
REPLY { status, script, request_id, detail… }
  reopened, version   the job is pending again
  not_failed, state   only a failed job can be reopened
  gone, ended_ms      its input is no longer kept
  not_found           no such job, or another incarnation
WRITES the record, once, if the reply is "reopened" for the first time
COST   O(attempts)
]]
local request_id, actor, reason = ARGV[2], ARGV[3], ARGV[4]
ECHO = request_id
local more, deadline = number_of(ARGV[5], 'attempts'), number_of(ARGV[6], 'deadline_ms')
if request_id == '' or actor == '' or reason == '' or more < 1 then
  fault('BADARG', 'request_id, actor and reason must not be empty, attempts must be 1 or more')
end
local record = read(KEYS[1], ARGV[1])
if not record then
  return reply('not_found')
end
if remembers(record, request_id, 0) then
  return reply('reopened', text(record[P.version]))
end
if record[P.state] ~= 'failed' then
  return reply('not_failed', record[P.state])
end
local now = clock(record)
if gone(record, now) then
  return reply('gone', text(record[P.ended_ms]))
end
local made = #record[P.attempts] - census(record).aborted
if made + more > ATTEMPTS_MAX then
  fault('BADARG', 'attempts must be at most ' .. text(ATTEMPTS_MAX - made) .. ', got ' .. text(more))
end
remember(record, request_id, 0)
note(record, now, 'reopened', 0, actor, reason)
record[P.policy][L.attempts_max] = made + more
record[P.version] = record[P.version] + 1
record[P.ended_ms] = 0
record[P.retain_until_ms] = 0
record[P.deadline_ms] = deadline > 0 and now + deadline or 0
record[P.reason] = reason
record[P.result_head], record[P.result_blob_bytes], record[P.result_body] = '', 0, ''
write(KEYS[1], record, now)
return reply('reopened', text(record[P.version]))
