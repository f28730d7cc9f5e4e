#!lua flags=allow-oom
--[[
cancel_job: ask for a job to be canceled, or end it at once.

A graceful cancel is a request: no attempt begins any more, one that is only starting is aborted, and the job ends as canceled once
the others have settled; a success that arrives first wins. "force" ends the job now, whatever its open attempts may still do; their
effect stays unknown and their heartbeats are fenced.

A caller that lost our reply sends the same request id again: nothing changes and it is told how the job stands.

KEYS
  [1] job     STRING, the record (docs/PROTOCOL.md)
ARGV
  [1] job_id      16 bytes, of this incarnation
  [2] request_id  text, new for each request
  [3] mode        "graceful" or "force"
  [4] actor       text, who asks
  [5] reason      text, why
REPLY { status, script, request_id, detail… }
  canceled, effect          the job ended as canceled; effect is "none", or "unknown" if attempts were open
  canceling, open attempts  it will, when they have settled
  ended, state              it had ended otherwise
  not_found                 no such job, or another incarnation
WRITES the record, once, unless nothing changes
COST   O(attempts)
]]
local request_id, mode, actor, reason = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
ECHO = request_id
if mode ~= 'graceful' and mode ~= 'force' then
  fault('BADARG', 'mode must be graceful or force, got ' .. mode)
end
if request_id == '' or actor == '' then
  fault('BADARG', 'request_id and actor must not be empty')
end
local record = read(KEYS[1], ARGV[1])
if not record then
  return reply('not_found')
end
local function effect()
  return census(record).open > 0 and 'unknown' or 'none'
end
if ended(record) then
  if record[P.state] == 'canceled' then
    return reply('canceled', effect())
  end
  return reply('ended', record[P.state])
end
local asked_before = record[P.canceled_by] ~= ''
if mode == 'graceful' and asked_before then
  return reply('canceling', text(census(record).open))
end

local now = clock(record)
remember(record, request_id, 0)
note(record, now, mode == 'force' and 'cancel_forced' or 'cancel_requested', 0, actor, reason)
record[P.canceled_by] = actor
record[P.reason] = reason
for _, attempt in ipairs(record[P.attempts]) do
  if attempt[A.state] == 'starting' then
    close(attempt, now, 'aborted', 'canceled')
  end
end
if mode == 'force' then
  end_job(record, now, 'canceled', reason)
else
  settle(record, now, { mode = 'end' }, reason)
end
write(KEYS[1], record, now)
if not ended(record) then
  return reply('canceling', text(census(record).open))
end
if record[P.state] == 'canceled' then
  return reply('canceled', effect())
end
return reply('ended', record[P.state])
