#!lua flags=allow-oom
--[[
extend_lease: a gateway says that it still works on an attempt.

An attempt that is starting keeps its authority only while its lease runs: once lapsed, it is fenced. One that is running may be
extended late, as long as nobody has judged it yet: its state blocks every other beginning all the while.

A caller that lost our reply sends the same sequence number again: nothing changes and the answer is the same.

KEYS
  [1] job     STRING, the record (docs/PROTOCOL.md)
ARGV
  [1] job_id     16 bytes, of this incarnation
  [2] number     of the attempt, from 1
  [3] token      16 bytes
  [4] sequence   1, 2, 3 …: one more for each new extension
  [5] lease_ms   from now
REPLY { status, script, token, detail… }
  extended, lease_until_ms, canceling   canceling is "yes" if somebody asked to cancel the job, else "no"
  fenced, why                           token, state, lease or ended
  not_found                             no such job, or another incarnation
WRITES the record, once, if the sequence number is new
COST   O(attempts)
]]
local number, token = number_of(ARGV[2], 'number'), ARGV[3]
ECHO = token
local sequence, lease = number_of(ARGV[4], 'sequence'), number_of(ARGV[5], 'lease_ms')
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
local state = attempt[A.state]
if state ~= 'starting' and state ~= 'running' then
  return reply('fenced', 'state')
end
local now = clock(record)
if state == 'starting' and attempt[A.lease_ms] <= now then
  return reply('fenced', 'lease')
end
local canceling = record[P.canceled_by] ~= '' and 'yes' or 'no'
if sequence <= attempt[A.sequence] then
  return reply('extended', text(attempt[A.lease_ms]), canceling)
end
attempt[A.sequence] = sequence
attempt[A.lease_ms] = math.max(attempt[A.lease_ms], now + lease)
write(KEYS[1], record, now)
return reply('extended', text(attempt[A.lease_ms]), canceling)
