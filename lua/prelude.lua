--[[
Shared by every script: the positions of the record, the clock, and the few rules that more than one transition needs.

The composer (src/store/compose.rs) puts, in this order: the script's own `#!lua` line, `local SCRIPT = '<name>'`, what the script
needs of this file, the body; names of positions become numbers.
A script reads the record, decides on a plain table and writes the record once, last. Absent values are '', 0 or {}; never nil or
false, which would turn the packed array into a map. docs/PROTOCOL.md binds; src/store/record.rs names the same positions in Rust.
]]
local SCHEMA = 1
local EVENTS_MAX = 32     -- the last events off the happy path that a record keeps
local REQUESTS_MAX = 16   -- the last requests that a record remembers
local ABORTED_MAX = 8     -- attempts that touched no provider, beyond the route's own attempts
local ATTEMPTS_MAX = 1000   -- attempts of one job that touch a provider, all its reopenings together: a record stays small
local STARTING_LOST_MAX = 3   -- attempts whose holders died before anything was sent: a gateway each
local MODELS_MAX = 32     -- breakers of one provider; further models share one
local REPORTS_MAX = 32    -- the last reports about a provider that are known again
local LAPSED_MAX = 32     -- lapsed permits that one call takes away
local SLICES = 10         -- parts of a breaker's window
local MODEL_IDLE_MS = 600000    -- a closed breaker that nobody asked for so long gives its place to another model
local CERTIFICATES_MAX = 8   -- certificates of one route and provider that are kept
local CERTIFICATE_EVENTS_MAX = 64   -- the last words on them
local CERTIFICATE_CALLS_MAX = 16   -- the last calls that changed how they stand
local CERTIFICATE_KEEP_MS = 2592000000   -- how long a certificate is known after it has expired: thirty days
local GUARD_LIFE_MS = 172800000   -- how long what is known of a provider outlives its last change: longer than any breaker is open

-- The record of a job.
local P = {
  schema = 1, job_id = 2, digest = 3, fingerprint = 4, owner = 5, route = 6, class = 7, state = 8,
  version = 9, revision = 10, created_ms = 11, updated_ms = 12, ended_ms = 13, deadline_ms = 14,
  next_at_ms = 15, holder = 16, holder_lease_ms = 17, completed_by = 18, retain_until_ms = 19,
  canceled_by = 20, reason = 21, policy = 22, attempts = 23, events = 24, requests = 25,
  input_head = 26, input_blob_bytes = 27, input_body = 28,
  result_head = 29, result_blob_bytes = 30, result_body = 31,
}
-- The route's rules, as they were when the job was submitted.
local L = {
  attempts_max = 1, race_max = 2, race_after_ms = 3, key_life_ms = 4, retention_ms = 5, release = 6, quarantine_ms = 7,
}
-- One attempt; its number is its place in the list.
local A = {
  state = 1, token = 2, provider = 3, gateway = 4, version = 5, started_ms = 6, lease_ms = 7, sequence = 8, ended_ms = 9,
  reason = 10, url = 11, request_hash = 12, certificate = 13, remote_id = 14, model = 15,
}
-- One breaker; `calls` and `failures` are lists of SLICES numbers, the newest first.
local B = {
  state = 1, generation = 2, run = 3, until_ms = 4, open_ms = 5, probe = 6, probe_lease_ms = 7, seen_ms = 8, slice = 9,
  calls = 10, failures = 11,
}
-- One event: { at_ms, event, attempt, actor, detail }.

-- A packed record keeps times as ms since created_ms, plus one (short numbers, and 0 stays "none"), and words as their place here.
local SINCE_CREATED = {
  P.updated_ms, P.ended_ms, P.deadline_ms, P.next_at_ms, P.holder_lease_ms, P.retain_until_ms,
}
local SINCE_CREATED_ATTEMPT = { A.started_ms, A.lease_ms, A.ended_ms }
local CLASSES = { 'exclusive', 'race' }
local JOB_STATES = { 'pending', 'running', 'unknown', 'canceling', 'succeeded', 'failed', 'canceled', 'indeterminate' }
local ATTEMPT_STATES = {
  'starting', 'running', 'succeeded', 'failed', 'unknown', 'aborted', 'canceled', 'abandoned', 'discarded',
}

local LAPSED = 'lease_lapsed'   -- the reason of an attempt that nobody kept alive
local NOT_SENT = 'not_sent'     -- the reason of one that was unknown until its holder said that nothing was sent

local ECHO = ''        -- what the caller recognizes its reply by; each body sets it
local JUST_ENDED = false

-- A whole number as text: Lua 5.1 prints large ones as 1.7e+12.
local function text(number)
  return string.format('%.0f', number)
end

local function reply(status, ...)
  return { status, SCRIPT, ECHO, ... }
end

-- Refuses a caller's bug, or a record that nobody may interpret, with an error of the store.
local function fault(code, detail)
  error({ err = code .. ' ' .. SCRIPT .. ': ' .. detail })
end

local function number_of(value, name)
  local n = tonumber(value)
  if not n or n < 0 or n ~= math.floor(n) or n > 9007199254740991 then
    fault('BADARG', name .. ' must be a whole number from 0, got ' .. tostring(value))
  end
  return n
end

local function move_times(row, positions, by)
  for i = 1, #positions do
    local at = row[positions[i]]
    if at > 0 then
      row[positions[i]] = at + by
    end
  end
end

local function place_of(words, word)
  for place = 1, #words do
    if words[place] == word then
      return place
    end
  end
  fault('BADRECORD', 'there is no word ' .. tostring(word))
end

local function word_at(words, place)
  return words[place] or fault('BADRECORD', 'there is no word ' .. tostring(place) .. ' of ' .. #words)
end

-- Moves a record between its two forms: packed, and plain, which is what the scripts work on.
local function recast(record, of, by)
  move_times(record, SINCE_CREATED, by)
  record[P.class] = of(CLASSES, record[P.class])
  record[P.state] = of(JOB_STATES, record[P.state])
  local attempts = record[P.attempts]
  for i = 1, #attempts do
    move_times(attempts[i], SINCE_CREATED_ATTEMPT, by)
    attempts[i][A.state] = of(ATTEMPT_STATES, attempts[i][A.state])
  end
end

local function pack_record(record)
  local by = record[P.created_ms] - 1
  recast(record, place_of, -by)
  local packed = cmsgpack.pack(record)
  recast(record, word_at, by)
  return packed
end

local function unpack_record(packed)
  local ok, record = pcall(cmsgpack.unpack, packed)
  if not ok or type(record) ~= 'table' then
    fault('BADRECORD', 'the record is not MessagePack')
  end
  if record[P.schema] ~= SCHEMA then
    fault('BADSCHEMA', 'the record has schema ' .. tostring(record[P.schema]) .. ', this script reads ' .. SCHEMA)
  end
  if #record ~= P.result_body then
    fault('BADRECORD', 'the record has ' .. #record .. ' fields, not ' .. P.result_body)
  end
  recast(record, word_at, record[P.created_ms] - 1)
  return record
end

-- The record, or nil where there is none or, with a job id, where it is another incarnation's.
local function read(key, job_id)
  local packed = redis.call('GET', key)
  if not packed then
    return nil
  end
  local record = unpack_record(packed)
  if job_id and record[P.job_id] ~= job_id then
    return nil
  end
  return record, packed
end

-- Redis' time in whole milliseconds; for a job it never runs backwards, whatever the server's clock does.
local function clock(record)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  if record and now < record[P.updated_ms] then
    return record[P.updated_ms]
  end
  return now
end

local function ended(record)
  return record[P.ended_ms] > 0
end

local function gone(record, now)
  return ended(record) and now >= record[P.retain_until_ms]
end

local function is_open(attempt)
  local state = attempt[A.state]
  return state == 'starting' or state == 'running' or state == 'unknown'
end

-- How many attempts are in each state.
local function census(record)
  local count = { starting = 0, running = 0, unknown = 0, aborted = 0, abandoned = 0, open = 0 }
  for _, attempt in ipairs(record[P.attempts]) do
    local state = attempt[A.state]
    count[state] = (count[state] or 0) + 1
    if is_open(attempt) then
      count.open = count.open + 1
    end
  end
  return count
end

-- Precedence: ended > canceling > running > unknown > pending.
local function derive(record)
  if ended(record) then
    return record[P.state]
  end
  if record[P.canceled_by] ~= '' then
    return 'canceling'
  end
  local count = census(record)
  if count.starting + count.running > 0 then
    return 'running'
  end
  return count.unknown > 0 and 'unknown' or 'pending'
end

local function deadline_passed(record, now)
  return record[P.deadline_ms] > 0 and now >= record[P.deadline_ms]
end

-- Attempts that touched a provider are bounded by the route; those that never did, by ABORTED_MAX more since the
-- job was submitted or reopened.
local function exhausted(record)
  local touched, aborted = 0, 0
  for _, attempt in ipairs(record[P.attempts]) do
    local unsent = attempt[A.state] == 'aborted' or (attempt[A.state] == 'failed' and attempt[A.reason] == NOT_SENT)
    if not unsent then
      touched = touched + 1
    elseif attempt[A.version] == record[P.version] then
      aborted = aborted + 1
    end
  end
  local limit = record[P.policy][L.attempts_max]
  return touched >= limit or touched + aborted >= limit + ABORTED_MAX
end

-- How many attempts lapsed before anything was sent, since the job was submitted or reopened.
local function lost(record)
  local count = 0
  for _, attempt in ipairs(record[P.attempts]) do
    local lapsed = attempt[A.state] == 'aborted' and attempt[A.reason] == LAPSED
    if lapsed and attempt[A.version] == record[P.version] then
      count = count + 1
    end
  end
  return count
end

-- The attempt of that number if the token is its own, else nil.
local function attempt_of(record, number, token)
  local attempt = record[P.attempts][number]
  if attempt and attempt[A.token] == token then
    return attempt
  end
  return nil
end

local function note(record, now, event, number, actor, detail)
  local events = record[P.events]
  events[#events + 1] = { now, event, number, actor, detail }
  if #events > EVENTS_MAX then
    table.remove(events, 1)
  end
end

-- Whether this event of this attempt was noted before, in these words. The oldest events go, and then it may be noted again.
local function happened(record, event, number, detail)
  for _, known in ipairs(record[P.events]) do
    if known[2] == event and known[3] == number and known[5] == detail then
      return true
    end
  end
  return false
end

-- A request id counts for one script and one attempt (0 for the job): under another call it is another request.
local function request_name(request_id, number)
  return SCRIPT .. ' ' .. text(number) .. ' ' .. request_id
end

local function remembers(record, request_id, number)
  local name = request_name(request_id, number)
  for _, known in ipairs(record[P.requests]) do
    if known == name then
      return true
    end
  end
  return false
end

local function remember(record, request_id, number)
  local requests = record[P.requests]
  requests[#requests + 1] = request_name(request_id, number)
  if #requests > REQUESTS_MAX then
    table.remove(requests, 1)
  end
end

local function end_job(record, now, state, reason)
  record[P.state] = state
  record[P.reason] = reason
  record[P.ended_ms] = now
  record[P.version] = record[P.version] + 1
  record[P.retain_until_ms] = now + record[P.policy][L.retention_ms]
  record[P.next_at_ms] = 0
  record[P.holder] = ''
  record[P.holder_lease_ms] = 0
  JUST_ENDED = true
end

local function close(attempt, now, state, reason)
  attempt[A.state] = state
  attempt[A.ended_ms] = now
  attempt[A.lease_ms] = 0
  attempt[A.reason] = reason
end

-- Closes an attempt that succeeded. Where it was sent, and what, serves questions that are answered now.
local function close_won(attempt, now)
  close(attempt, now, 'succeeded', '')
  attempt[A.url] = ''
  attempt[A.request_hash] = ''
end

-- A result may be claimed once, by an attempt that began under the version which still stands.
local function may_win(record, attempt)
  return not ended(record) and record[P.completed_by] == 0 and attempt[A.version] == record[P.version]
end

local function win(record, now, number, result)
  record[P.completed_by] = number
  record[P.result_head] = result.head
  record[P.result_blob_bytes] = result.blob_bytes
  record[P.result_body] = result.body
  end_job(record, now, 'succeeded', '')
end

-- After an attempt closed without a success: the job ends, waits for its other attempts, or may begin again.
-- follow.mode is 'retry' or 'end'; follow.delay_ms is how long to wait before the next attempt; follow.holder keeps the job for
-- the caller for follow.lease_ms beyond that.
local function settle(record, now, follow, reason)
  local count = census(record)
  if ended(record) or count.open > 0 then
    return
  end
  if record[P.canceled_by] ~= '' then
    return end_job(record, now, count.abandoned > 0 and 'indeterminate' or 'canceled', reason)
  end
  if follow.mode == 'retry' and not exhausted(record) and not deadline_passed(record, now + follow.delay_ms) then
    record[P.next_at_ms] = now + follow.delay_ms
    record[P.holder] = follow.holder
    record[P.holder_lease_ms] = follow.holder == '' and 0 or now + follow.delay_ms + follow.lease_ms
    return
  end
  if count.abandoned > 0 then
    return end_job(record, now, 'indeterminate', reason)
  end
  end_job(record, now, 'failed', reason)
end

-- The one write; returns what was written. An open job has no TTL; the key's life begins with the end; later changes keep what is
-- left of it.
local function write(key, record, now)
  record[P.state] = derive(record)
  record[P.updated_ms] = now
  record[P.revision] = record[P.revision] + 1
  local packed = pack_record(record)
  if JUST_ENDED then
    redis.call('SET', key, packed, 'PX', text(record[P.policy][L.key_life_ms]))
  elseif ended(record) then
    redis.call('SET', key, packed, 'KEEPTTL')
  else
    redis.call('SET', key, packed)
  end
  return packed
end

-- When somebody should look at the job next, in ms; 0 for never. Also an ended job may have an attempt that still runs: a race's
-- loser, or one that was left behind by force.
local function next_due(record, now)
  local due = 0
  local function at(moment)
    if moment > 0 and (due == 0 or moment < due) then
      due = moment
    end
  end
  for _, attempt in ipairs(record[P.attempts]) do
    if attempt[A.state] == 'starting' or attempt[A.state] == 'running' then
      at(attempt[A.lease_ms])
    end
  end
  if ended(record) then
    local strip = record[P.input_body] ~= '' or record[P.result_body] ~= ''
    if strip and record[P.policy][L.retention_ms] < record[P.policy][L.key_life_ms] then
      at(record[P.retain_until_ms])
    end
    return due
  end
  if record[P.deadline_ms] > now then
    at(record[P.deadline_ms])
  end
  if derive(record) == 'pending' then
    at(math.max(record[P.holder_lease_ms], record[P.next_at_ms], now))
  end
  return due
end

-- A breaker that has seen nothing. Its generation is a time, so that one that was forgotten is never taken for its successor.
local function new_breaker(now)
  return { 'closed', now, 0, 0, 0, '', 0, now, 0, {}, {} }
end

local function unpack_breaker(packed)
  local ok, breaker = pcall(cmsgpack.unpack, packed)
  if not ok or type(breaker) ~= 'table' or #breaker ~= B.failures then
    fault('BADRECORD', 'a breaker is not what this script reads')
  end
  return breaker
end

-- Whether a moment is still to come. One further ahead than anybody can have set it is of a clock that was set back, and is over.
local function is_ahead(moment, now, longest)
  return moment > now and moment <= now + longest
end

-- What a breaker lets pass: "closed" everything, "half_open" one probe, "open" nothing; and how long for, in ms.
local function standing(breaker, now, probe_lease)
  if breaker[B.state] == 'closed' then
    return 'closed', 0
  end
  if is_ahead(breaker[B.until_ms], now, breaker[B.open_ms]) then
    return 'open', breaker[B.until_ms] - now
  end
  if breaker[B.probe] ~= '' and is_ahead(breaker[B.probe_lease_ms], now, probe_lease) then
    return 'half_open', breaker[B.probe_lease_ms] - now
  end
  return 'half_open', 0
end

-- Opens a breaker, never for a shorter time than it is open already. What was admitted before is of another generation.
local function open_breaker(breaker, now, open)
  breaker[B.state] = 'open'
  breaker[B.generation] = math.max(breaker[B.generation] + 1, now)
  breaker[B.open_ms] = open
  breaker[B.until_ms] = now + open
  breaker[B.run] = 0
  breaker[B.probe] = ''
  breaker[B.probe_lease_ms] = 0
  breaker[B.calls] = {}
  breaker[B.failures] = {}
end

-- What is kept of each certificate, before its name.
local CERTIFICATE_FIELDS = { 'certificate:', 'standing:', 'by:', 'reason:' }
-- The texts of each word on one.
local CERTIFICATE_EVENT_TEXTS = { 'event', 'id', 'by', 'reason' }

-- The names of the certificates that are kept, the newest first.
local function certificate_ids(key)
  local ids = {}
  for id in (redis.call('HGET', key, 'ids') or ''):gmatch('%x+') do
    ids[#ids + 1] = id
  end
  return ids
end

-- The words on certificates so far. They are told, and decide nothing that stands: what cannot be read of them is left out, so that it
-- keeps nobody from the next word.
local function certificate_events(key)
  local ok, events = pcall(cjson.decode, redis.call('HGET', key, 'events') or '[]')
  local readable = {}
  for _, event in ipairs(ok and type(events) == 'table' and events or readable) do
    local whole = type(event) == 'table' and type(event.at_ms) == 'number' and event.at_ms >= 0 and event.at_ms % 1 == 0
    for _, field in ipairs(CERTIFICATE_EVENT_TEXTS) do
      whole = whole and type(event[field]) == 'string'
    end
    if whole then
      readable[#readable + 1] = event
    end
  end
  return readable
end

local function certificate_event(events, now, event, id, by, reason)
  events[#events + 1] = { at_ms = now, event = event, id = id, by = by, reason = reason }
  if #events > CERTIFICATE_EVENTS_MAX then
    table.remove(events, 1)
  end
end
