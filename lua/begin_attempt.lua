#!lua
--[[
begin_attempt: take the one free slot of a job for a new attempt.

Every reason not to begin is decided here, on the record, at one moment: an attempt that is starting or unknown blocks always, one
that is running blocks unless the job is a race and it has run for race_after_ms. A timeout therefore cannot lead to a second call.

A caller that lost our reply sends the same call again and is answered "repeated" with its attempt's present state.

KEYS
  [1] job     STRING, the record (docs/PROTOCOL.md)
ARGV
  [1] job_id        16 bytes, of this incarnation; another one answers "not_found"
  [2] token         16 bytes, new for each attempt
  [3] holder        16 bytes: the token that holds the pending job; '' for a caller that holds nothing
  [4] begin         "starting", or "running" if the write-ahead is this call
  [5] lease_ms      from now
  [6] provider      text
  [7] gateway       text
  [8] url           the resolved URL, '' unless "running"
  [9] request_hash  32 bytes, '' unless "running"
  [10] certificate  hash, '' for none
REPLY { status, script, token, detail… }
  started, number, lease_until_ms     the slot is this attempt's
  repeated, number, state             an earlier call with this token began it
  blocked, state, number              an attempt that is starting, running or unknown is in the way
  too_early, ms                       a delay, or another holder's lease, has so long to run
  exhausted, attempts                 the job's attempts are used up
  deadline, deadline_ms               the job's time is over
  canceling                           somebody asked to cancel it
  ended, state                        the job has ended
  not_found                           no such job, or another incarnation
WRITES the record, once, if the reply is "started"
COST   O(attempts)
]]
local job_id, token, holder, begin = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
ECHO = token
if #token ~= 16 or (begin ~= 'starting' and begin ~= 'running') then
  fault('BADARG', 'token is 16 bytes, begin is starting or running')
end
local lease = number_of(ARGV[5], 'lease_ms')

local record = read(KEYS[1], job_id)
if not record then
  return reply('not_found')
end
for number, attempt in ipairs(record[P.attempts]) do
  if attempt[A.token] == token then
    return reply('repeated', text(number), attempt[A.state])
  end
end
if ended(record) then
  return reply('ended', record[P.state])
end
if record[P.canceled_by] ~= '' then
  return reply('canceling')
end
local now = clock(record)
local policy = record[P.policy]
local open = 0
for _, blocker in ipairs({ 'unknown', 'starting' }) do
  for number, attempt in ipairs(record[P.attempts]) do
    if attempt[A.state] == blocker then
      return reply('blocked', blocker, text(number))
    end
  end
end
for number, attempt in ipairs(record[P.attempts]) do
  if attempt[A.state] == 'running' then
    open = open + 1
    local raced = record[P.class] == 'race' and now - attempt[A.started_ms] >= policy[L.race_after_ms]
    if not raced or open >= policy[L.race_max] then
      return reply('blocked', 'running', text(number))
    end
  end
end
if deadline_passed(record, now) then
  return reply('deadline', text(record[P.deadline_ms]))
end
if exhausted(record) then
  return reply('exhausted', text(#record[P.attempts]))
end
if open == 0 then
  local free_at = record[P.next_at_ms]
  if record[P.holder] ~= holder then
    free_at = math.max(free_at, record[P.holder_lease_ms])
  end
  if free_at > now then
    return reply('too_early', text(free_at - now))
  end
end

local number = #record[P.attempts] + 1
record[P.attempts][number] = {
  begin, token, ARGV[6], ARGV[7], record[P.version], now, now + lease, 0, 0, '', ARGV[8], ARGV[9], ARGV[10], '', '',
}
record[P.next_at_ms] = 0
record[P.holder] = ''
record[P.holder_lease_ms] = 0
record[P.reason] = ''
write(KEYS[1], record, now)
return reply('started', text(number), text(now + lease))
