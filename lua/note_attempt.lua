#!lua flags=allow-oom
--[[
note_attempt: write down what was learned about an attempt without ending it.

The provider's own name for the work, so that another gateway can ask about it if this one dies; and what was done about it since. The
state of attempt and job is never touched, and a name that stands is never replaced: what was asked about by it stays askable. An
attempt that has ended may be noted too: it may still cost something.

A caller that lost our reply sends the same call again and is answered "repeated". So does one that was told the same by somebody else.
"replayed" is written down of an unknown attempt of an open job alone, before it is sent again: whoever is told another state does
not send it.

KEYS
  [1] job     STRING, the record (docs/PROTOCOL.md)
ARGV
  [1] job_id     16 bytes, of this incarnation; another one answers "not_found"
  [2] number     of the attempt, from 1
  [3] token      16 bytes, the attempt's: whoever asks on its behalf has it from the record
  [4] remote_id  text, the provider's own name for the work, '' for no news of it
  [5] model      text, which model answers, '' for no news of it
  [6] event      "cancel_seen", "cancel_sent", "needs_operator" or "replayed", '' for none
  [7] actor      text, who says so; '' without an event
  [8] detail     text; the same event with another detail is another event
REPLY { status, script, token, detail… }
  noted, attempt state, job state      it is written down
  repeated, attempt state, job state   there was nothing new in it
  not_found                            no such job, attempt or token, or another incarnation
WRITES the record, once, if the reply is "noted"
COST   O(attempts + events)
]]
local number, token, remote_id, model, event = number_of(ARGV[2], 'number'), ARGV[3], ARGV[4], ARGV[5], ARGV[6]
ECHO = token
local actor, detail = ARGV[7], ARGV[8]
if #event > 0 and event ~= 'cancel_seen' and event ~= 'cancel_sent' and event ~= 'needs_operator' and event ~= 'replayed' then
  fault('BADARG', 'event must be cancel_seen, cancel_sent, needs_operator or replayed, got ' .. event)
end
if #event > 0 and actor == '' then
  fault('BADARG', 'an event has an actor')
end

local record = read(KEYS[1], ARGV[1])
local attempt = record and attempt_of(record, number, token)
if not attempt then
  return reply('not_found')
end
local news = false
if remote_id ~= '' and attempt[A.remote_id] == '' then
  attempt[A.remote_id] = remote_id
  news = true
end
if model ~= '' and attempt[A.model] == '' then
  attempt[A.model] = model
  news = true
end
local replayable = attempt[A.state] == 'unknown' and not ended(record)
local now = clock(record)
if #event > 0 and (event ~= 'replayed' or replayable) and not happened(record, event, number, detail) then
  note(record, now, event, number, actor, detail)
  news = true
end
if not news then
  return reply('repeated', attempt[A.state], record[P.state])
end
write(KEYS[1], record, now)
return reply('noted', attempt[A.state], record[P.state])
