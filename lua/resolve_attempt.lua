#!lua flags=allow-oom
--[[
resolve_attempt: somebody outside decides what became of an unknown attempt, and says who and why.

"succeeded" claims the result exactly as finish_attempt would. "failed" and "canceled" mean that nothing happened, or no longer
does; without the provider's own word they are believed only once the quarantine has passed, because a paused gateway may still
send; it begins anew whenever a gateway sends the attempt again. "abandoned" takes the risk by name.

A caller that lost our reply sends the same request id again and is answered "repeated".

KEYS
  [1] job     STRING, the record (docs/PROTOCOL.md)
ARGV
  [1] job_id             16 bytes, of this incarnation
  [2] number             of the attempt, from 1
  [3] request_id         text, new for each decision
  [4] outcome            "succeeded", "failed", "canceled" or "abandoned"
  [5] actor              text, who decides
  [6] reason             text, why
  [7] evidence           "provider": the provider's own word; "operator": somebody's
  [8] result_head        text: the result's, or, for "failed", the head of the provider's refusal; '' if there is none
  [9] result_blob_bytes  size of the blob, 0 if the body is in [10]
  [10] result_body       the body, or the SHA-256 that names the blob
  [11] follow            "retry": another attempt may begin; "end": the job ends with this
REPLY { status, script, request_id, detail… }
  won, version              this decision claimed the result
  recorded, job state       the attempt is closed as decided
  repeated, attempt state, job state, completed_by
                            an earlier call with this request id did it
  discarded, attempt state, completed_by
                            the job had ended; only the attempt's row says so
  quarantine, until_ms, ms  too early to believe that nothing happened
  not_unknown, state        the attempt is not unknown
  not_found                 no such job or attempt, or another incarnation
WRITES the record, once, if the reply is "won", "recorded" or "discarded"
COST   O(attempts + events), plus the size of the result
]]
local number, request_id, outcome, actor, reason = number_of(ARGV[2], 'number'), ARGV[3], ARGV[4], ARGV[5], ARGV[6]
ECHO = request_id
local result = { head = ARGV[8], blob_bytes = number_of(ARGV[9], 'result_blob_bytes'), body = ARGV[10] }
local follow = { mode = ARGV[11], delay_ms = 0, lease_ms = 0, holder = '' }
if outcome ~= 'succeeded' and outcome ~= 'failed' and outcome ~= 'canceled' and outcome ~= 'abandoned' then
  fault('BADARG', 'outcome must be succeeded, failed, canceled or abandoned, got ' .. outcome)
end
if request_id == '' or actor == '' or reason == '' then
  fault('BADARG', 'request_id, actor and reason must not be empty')
end
if follow.mode ~= 'retry' and follow.mode ~= 'end' then
  fault('BADARG', 'follow must be retry or end, got ' .. follow.mode)
end

local record = read(KEYS[1], ARGV[1])
local attempt = record and record[P.attempts][number]
if not attempt then
  return reply('not_found')
end
if remembers(record, request_id, number) then
  return reply('repeated', attempt[A.state], record[P.state], text(record[P.completed_by]))
end
if attempt[A.state] ~= 'unknown' then
  return reply('not_unknown', attempt[A.state])
end
local now = clock(record)
if (outcome == 'failed' or outcome == 'canceled') and ARGV[7] ~= 'provider' then
  local quiet_since = attempt[A.ended_ms]
  for _, event in ipairs(record[P.events]) do
    -- It was sent again since: that may be on its way as the first one was.
    if event[2] == 'replayed' and event[3] == number then
      quiet_since = math.max(quiet_since, event[1])
    end
  end
  local until_ms = quiet_since + record[P.policy][L.quarantine_ms]
  if until_ms > now then
    return reply('quarantine', text(until_ms), text(until_ms - now))
  end
end

remember(record, request_id, number)
note(record, now, 'resolved', number, actor, outcome .. ': ' .. reason)
if outcome == 'succeeded' then
  if may_win(record, attempt) then
    close_won(attempt, now)
    win(record, now, number, result)
    write(KEYS[1], record, now)
    return reply('won', text(record[P.version]))
  end
  close(attempt, now, 'discarded', record[P.state])
  write(KEYS[1], record, now)
  return reply('discarded', 'discarded', text(record[P.completed_by]))
end
close(attempt, now, outcome, reason)
settle(record, now, follow, reason)
if not ended(record) then
  record[P.reason] = reason
elseif JUST_ENDED and record[P.state] == 'failed' and outcome == 'failed' then
  record[P.result_head], record[P.result_blob_bytes], record[P.result_body] = result.head, result.blob_bytes, result.body
end
write(KEYS[1], record, now)
return reply('recorded', record[P.state])
