#!lua flags=allow-oom
--[[
finish_attempt: record how an attempt ended; a success claims the job's result at most once.

A compare-and-set on (version, completed_by): an attempt that lost the race changes nothing but its own row, whatever it computed.
A lapsed lease costs an attempt its authority, never its evidence: a late success wins while the job is open and nobody else has.

A caller that lost our reply sends the same call again and is answered "repeated".

KEYS
  [1] job     STRING, the record (docs/PROTOCOL.md)
ARGV
  [1] job_id             16 bytes, of this incarnation; another one answers "not_found"
  [2] number             of the attempt, from 1
  [3] token              16 bytes, that the attempt began with
  [4] outcome            "succeeded", "failed", "unknown" or "aborted" (this caller knows that nothing was sent)
  [5] result_head        text: the result's, or, for "failed", the head of the provider's refusal; '' if there is none
  [6] result_blob_bytes  size of the blob, 0 if the body is in [7]
  [7] result_body        the body, or the SHA-256 that names the blob
  [8] reason             text, why it did not succeed
  [9] remote_id          text, the provider's own name for the work, '' if none
  [10] model             text, which model answered, '' if none
  [11] follow            "retry": another attempt may begin; "end": this failure is the job's
  [12] delay_ms          for "retry": how long to wait before it
  [13] hold_ms           for "retry": how long beyond that the caller's token keeps the job for itself
  [14] tell              "record": a caller that wins has somebody waiting for the job; "nothing": it has not
REPLY { status, script, token, detail… }
  won, version, attempt state before, record
                            this call claimed the result; the record is '' unless it was asked for
  recorded, job state       the attempt's row is as reported; the job goes on or has ended without a result from it
  repeated, attempt state, job state, completed_by
                            an earlier call with this token and outcome did the same
  discarded, attempt state, completed_by
                            the job had ended, or the attempt was already judged; nothing but its own row can have changed; or
                            it is unknown and was sent again meanwhile, so that a failure of the first call proves nothing
  not_found                 no such job, attempt or token, or another incarnation
WRITES the record, once, unless the reply is "not_found", or "repeated" or "discarded" without news
COST   O(attempts), plus the size of the result
]]
local number, token, outcome, reason = number_of(ARGV[2], 'number'), ARGV[3], ARGV[4], ARGV[8]
ECHO = token
local tell = ARGV[14]
local result = { head = ARGV[5], blob_bytes = number_of(ARGV[6], 'result_blob_bytes'), body = ARGV[7] }
local follow = {
  mode = ARGV[11], delay_ms = number_of(ARGV[12], 'delay_ms'), lease_ms = number_of(ARGV[13], 'hold_ms'), holder = token,
}
if outcome ~= 'succeeded' and outcome ~= 'failed' and outcome ~= 'unknown' and outcome ~= 'aborted' then
  fault('BADARG', 'outcome must be succeeded, failed, unknown or aborted, got ' .. outcome)
end
if tell ~= 'record' and tell ~= 'nothing' then
  fault('BADARG', 'tell must be record or nothing, got ' .. tostring(tell))
end
if follow.mode ~= 'retry' and follow.mode ~= 'end' then
  fault('BADARG', 'follow must be retry or end, got ' .. follow.mode)
end

local record = read(KEYS[1], ARGV[1])
local attempt = record and attempt_of(record, number, token)
if not attempt then
  return reply('not_found')
end
local was = attempt[A.state]
local winner = text(record[P.completed_by])

-- The same news again, or, for a success that was judged already, old news.
local same = was == outcome
  or (outcome == 'succeeded' and was == 'discarded')
  or (outcome == 'aborted' and was == 'failed' and attempt[A.reason] == NOT_SENT)
if same then
  -- That nobody kept it alive was all that was known; its own holder, late, knows better.
  if attempt[A.reason] == LAPSED and reason ~= LAPSED and (outcome == 'aborted' or outcome == 'unknown') then
    attempt[A.reason] = reason
    if not ended(record) and record[P.reason] == LAPSED then
      record[P.reason] = reason
    end
    write(KEYS[1], record, clock(record))
  end
  return reply('repeated', was, record[P.state], winner)
end
local judged = was == 'succeeded' or was == 'discarded'
if judged or (not is_open(attempt) and outcome ~= 'succeeded') then
  return reply('discarded', was, winner)
end

if was == 'unknown' and (outcome == 'failed' or outcome == 'aborted') then
  for _, event in ipairs(record[P.events]) do
    -- It was sent again meanwhile: what became of the holder's own call says nothing about that one.
    if event[2] == 'replayed' and event[3] == number then
      return reply('discarded', was, winner)
    end
  end
end

local now = clock(record)
if ARGV[9] ~= '' then
  attempt[A.remote_id] = ARGV[9]
end
if ARGV[10] ~= '' then
  attempt[A.model] = ARGV[10]
end

if outcome == 'succeeded' then
  if not is_open(attempt) then
    note(record, now, 'contradiction', number, attempt[A.gateway], was .. ', then succeeded')
  end
  if may_win(record, attempt) then
    if was == 'unknown' then
      note(record, now, 'late_success', number, attempt[A.gateway], attempt[A.reason])
    end
    close_won(attempt, now)
    win(record, now, number, result)
    local packed = write(KEYS[1], record, now)
    return reply('won', text(record[P.version]), was, tell == 'record' and packed or '')
  end
  close(attempt, now, 'discarded', record[P.state])
  note(record, now, 'discarded', number, attempt[A.gateway], 'job ' .. record[P.state] .. ', completed by ' .. winner)
  write(KEYS[1], record, now)
  return reply('discarded', 'discarded', winner)
end

if outcome == 'unknown' then
  close(attempt, now, 'unknown', reason)
  note(record, now, 'unknown', number, attempt[A.gateway], reason)
  if not ended(record) then
    record[P.reason] = reason
  end
  write(KEYS[1], record, now)
  return reply('recorded', record[P.state])
end

-- A definite failure. "aborted" by the holder of an attempt that was meanwhile called unknown is the proof that it failed unsent.
if outcome == 'aborted' and was == 'unknown' then
  close(attempt, now, 'failed', NOT_SENT)
else
  close(attempt, now, outcome, reason)
end
note(record, now, attempt[A.state], number, attempt[A.gateway], reason)
settle(record, now, follow, reason)
if not ended(record) then
  record[P.reason] = reason
elseif JUST_ENDED and record[P.state] == 'failed' then
  -- No result, but an answer: a proxy replays the provider's own refusal. completed_by stays 0.
  record[P.result_head], record[P.result_blob_bytes], record[P.result_body] = result.head, result.blob_bytes, result.body
end
write(KEYS[1], record, now)
return reply('recorded', record[P.state])
