#!lua flags=allow-oom
--[[
tick_job: let time act on a job: leases that lapsed, a deadline that passed, bytes that need no longer be kept.

A lapsed attempt that was starting never touched a provider: aborted. One that was running may have: unknown, never failed. Each
that lapsed while starting may have taken its gateway with it, so after STARTING_LOST_MAX of them the job fails as poison. The call
names no incarnation because it only compares the record's own times with the clock.

Sent again, it finds nothing left to do.

KEYS
  [1] job     STRING, the record (docs/PROTOCOL.md)
ARGV
  [1] echo    text, given back in the reply
REPLY { status, script, echo, detail… }
  ticked, job_id, job state, due_ms, blobs, open, changes
                                                    changes: words among aborted, unknown, poisoned, deadline, stripped, with spaces
  unchanged, job_id, job state, due_ms, blobs, open
                                                    due_ms: when to look again, 0 for no time of its own; blobs: "yes" if the
                                                    record names a blob, else "no"; open: how many attempts are
  not_found                                         no such job
WRITES the record, once, if something changed
COST   O(attempts)
]]
ECHO = ARGV[1]
local record = read(KEYS[1])
if not record then
  return reply('not_found')
end
local now = clock(record)
local changes = {}
local function changed(word)
  if changes[#changes] ~= word then
    changes[#changes + 1] = word
  end
end

local retry = { mode = 'retry', delay_ms = 0, lease_ms = 0, holder = '' }
for number, attempt in ipairs(record[P.attempts]) do
  local state = attempt[A.state]
  if (state == 'starting' or state == 'running') and attempt[A.lease_ms] <= now then
    local becomes = state == 'starting' and 'aborted' or 'unknown'
    close(attempt, now, becomes, LAPSED)
    note(record, now, becomes, number, attempt[A.gateway], LAPSED)
    changed(becomes)
    if not ended(record) then
      record[P.reason] = LAPSED
    end
    local deaths = becomes == 'aborted' and lost(record) or 0
    if deaths >= STARTING_LOST_MAX then
      settle(record, now, { mode = 'end' }, 'poison: ' .. text(deaths) .. ' attempts lost their holders before anything was sent')
      if JUST_ENDED then
        note(record, now, 'poisoned', 0, 'onejob', record[P.reason])
        changed('poisoned')
      end
    else
      settle(record, now, retry, LAPSED)
    end
  end
end
if not ended(record) and deadline_passed(record, now) and census(record).open == 0 then
  note(record, now, 'deadline', 0, 'onejob', '')
  settle(record, now, { mode = 'end' }, 'deadline')
  changed('deadline')
end
if gone(record, now) and (record[P.input_body] ~= '' or record[P.result_body] ~= '') then
  record[P.input_head], record[P.input_blob_bytes], record[P.input_body] = '', 0, ''
  record[P.result_head], record[P.result_blob_bytes], record[P.result_body] = '', 0, ''
  changed('stripped')
end

local open = text(census(record).open)
local blobs = record[P.input_blob_bytes] + record[P.result_blob_bytes] > 0 and 'yes' or 'no'
if #changes == 0 then
  return reply('unchanged', record[P.job_id], record[P.state], text(next_due(record, now)), blobs, open)
end
write(KEYS[1], record, now)
return reply('ticked', record[P.job_id], record[P.state], text(next_due(record, now)), blobs, open, table.concat(changes, ' '))
