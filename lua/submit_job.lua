#!lua
--[[
submit_job: claim a key for one job, or answer what the key already stands for.

The claim is the record: `SET NX GET` creates it or returns the one that was first, so two submits at the same moment cannot both
create. With a first attempt in it, the claim is that attempt's write-ahead too, and a whole job takes two round trips.

A caller that lost our reply sends the same call again and is answered "created" again, with the attempt's present state: it may
only go on to the provider while that is "running" and its own lease clock has not run out.

KEYS
  [1] job     STRING, the record (docs/PROTOCOL.md)
ARGV
  [1] job_id            16 bytes: Unix ms, version, variant, identity
  [2] digest            16 bytes: the second half of SHA-256 over owner and key
  [3] fingerprint       16 bytes: the second half of SHA-256 over the request
  [4] owner             text
  [5] route             text
  [6] class             "exclusive" or "race"
  [7] deadline_ms       from now; 0 for none
  [8] attempts_max      1 to 1000
  [9] race_max          1 to 1000
  [10] race_after_ms    how long an attempt runs before another may begin
  [11] key_life_ms      from the end of the job, 1 or more
  [12] retention_ms     from the end of the job, at most key_life_ms
  [13] on_failure       "keep" or "release"
  [14] quarantine_ms    before "it never happened" is believed
  [15] input_head       text, the request's head
  [16] input_blob_bytes size of the blob, 0 if the body is in [17]
  [17] input_body       the body, or the SHA-256 that names the blob
  [18] begin            "pending", "starting" or "running"
  [19] token            16 bytes: the attempt's, or, for "pending", the holder's
  [20] lease_ms         the attempt's, or the holder's, from now
  [21] provider         text, '' for "pending"
  [22] gateway          text
  [23] url              the resolved URL, '' unless "running"
  [24] request_hash     32 bytes, '' unless "running"
  [25] certificate      hash, '' for none
REPLY { status, script, token, detail… }
  created, job_id, created_ms, state of the first attempt   the key is this call's
  existing, record                                          the same request came first
  conflict, job_id                                          another request came first
  gone, job_id, state, ended_ms, owner                      ended so long ago that the result is no longer kept
  collision                                                 another (owner, key) has the same identity
WRITES the record, once, if the reply is "created" for the first time
COST   O(1), plus the size of the input
]]
ECHO = ARGV[19]
local job_id, digest, fingerprint, begin, token = ARGV[1], ARGV[2], ARGV[3], ARGV[18], ARGV[19]
if #job_id ~= 16 or #digest ~= 16 or #fingerprint ~= 16 or #token ~= 16 then
  fault('BADARG', 'job_id, digest, fingerprint and token are 16 bytes')
end
if begin ~= 'pending' and begin ~= 'starting' and begin ~= 'running' then
  fault('BADARG', 'begin must be pending, starting or running, got ' .. begin)
end

local now = clock()
local lease_ms = now + number_of(ARGV[20], 'lease_ms')
local deadline = number_of(ARGV[7], 'deadline_ms')
local policy = {
  number_of(ARGV[8], 'attempts_max'), number_of(ARGV[9], 'race_max'), number_of(ARGV[10], 'race_after_ms'),
  number_of(ARGV[11], 'key_life_ms'), number_of(ARGV[12], 'retention_ms'), ARGV[13] == 'release' and 1 or 0,
  number_of(ARGV[14], 'quarantine_ms'),
}
if policy[L.attempts_max] < 1 or policy[L.race_max] < 1 or policy[L.key_life_ms] < 1 then
  fault('BADARG', 'attempts_max, race_max and key_life_ms must be 1 or more')
end
if policy[L.attempts_max] > ATTEMPTS_MAX or policy[L.race_max] > ATTEMPTS_MAX then
  fault('BADARG', 'attempts_max and race_max must be at most ' .. text(ATTEMPTS_MAX))
end
if policy[L.retention_ms] > policy[L.key_life_ms] then
  fault('BADARG', 'retention_ms must be at most key_life_ms')
end
if ARGV[6] ~= 'exclusive' and ARGV[6] ~= 'race' then
  fault('BADARG', 'class must be exclusive or race, got ' .. ARGV[6])
end
if ARGV[13] ~= 'keep' and ARGV[13] ~= 'release' then
  fault('BADARG', 'on_failure must be keep or release, got ' .. ARGV[13])
end
local attempts = {}
if begin ~= 'pending' then
  attempts[1] = {
    begin, token, ARGV[21], ARGV[22], 0, now, lease_ms, 0, 0, '', ARGV[23], ARGV[24], ARGV[25], '', '',
  }
end
local pending = begin == 'pending'
local record = {
  SCHEMA, job_id, digest, fingerprint, ARGV[4], ARGV[5], ARGV[6], pending and 'pending' or 'running',
  0, 1, now, now, 0, deadline > 0 and now + deadline or 0,
  0, pending and token or '', pending and lease_ms or 0, 0, 0,
  '', '', policy, attempts, {}, {},
  ARGV[15], number_of(ARGV[16], 'input_blob_bytes'), ARGV[17],
  '', 0, '',
}

local first = redis.call('SET', KEYS[1], pack_record(record), 'NX', 'GET')
if not first then
  return reply('created', job_id, text(now), begin)
end

local known = unpack_record(first)
if known[P.digest] ~= digest then
  return reply('collision')
end
local own = known[P.attempts][1]
if (own and own[A.token] == token) or known[P.holder] == token then
  return reply('created', known[P.job_id], text(known[P.created_ms]), own and own[A.state] or 'pending')
end

local released = known[P.state] == 'failed' and known[P.policy][L.release] == 1 and census(known).abandoned == 0
if not released then
  if known[P.fingerprint] ~= fingerprint then
    return reply('conflict', known[P.job_id])
  end
  if gone(known, clock(known)) then
    return reply('gone', known[P.job_id], known[P.state], text(known[P.ended_ms]), known[P.owner])
  end
  return reply('existing', first)
end

-- The failed job gave its key back. The new incarnation's time bits are later than the old one's, so no id names two jobs.
local function time_of(id)
  local ms = 0
  for i = 1, 6 do
    ms = ms * 256 + id:byte(i)
  end
  return ms
end
local ms = math.max(time_of(job_id), time_of(known[P.job_id]) + 1)
local bytes = ''
for _ = 1, 6 do
  bytes = string.char(ms % 256) .. bytes
  ms = math.floor(ms / 256)
end
record[P.job_id] = bytes .. job_id:sub(7)
redis.call('SET', KEYS[1], pack_record(record))
return reply('created', record[P.job_id], text(now), begin)
