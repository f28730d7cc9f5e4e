#!lua flags=no-writes
--[[
read_job: the whole job at one moment, for a program or for a person.

By hand: redis-cli EVAL "$(onejob script read_job)" 1 oj:<identity> names

KEYS
  [1] job     STRING, the record (docs/PROTOCOL.md)
ARGV
  [1] form    "record": packed, for a program; "names": a name and a value in turn, for a person
  [2] echo    text, given back in the reply
REPLY { status, script, echo, detail… }
  found, record                     form "record"
  found, name, value, …             form "names"; bytes in hexadecimal, of bodies only the size
  gone, job_id, state, ended_ms, owner
                                    ended so long ago that the result is no longer kept
  not_found                         no such job
WRITES nothing
COST   O(1), plus the size of the record
]]
ECHO = ARGV[2] or ''
local record, packed = read(KEYS[1])
if not record then
  return reply('not_found')
end
if gone(record, clock(record)) then
  return reply('gone', record[P.job_id], record[P.state], text(record[P.ended_ms]), record[P.owner])
end
if ARGV[1] ~= 'names' then
  return reply('found', packed)
end

local function hex(bytes)
  return (bytes:gsub('.', function(byte) return string.format('%02x', byte:byte()) end))
end
local raw = { job_id = hex, digest = hex, fingerprint = hex, holder = hex, token = hex, request_hash = hex }
raw.input_body = function(body) return #body .. ' bytes here' end
raw.result_body = raw.input_body
local function shown(name, value)
  if raw[name] then
    return raw[name](value)
  end
  return type(value) == 'number' and text(value) or tostring(value)
end
local function list(positions, row, prefix, out)
  local names = {}
  for name, position in pairs(positions) do
    names[position] = name
  end
  for position, name in ipairs(names) do
    if type(row[position]) ~= 'table' then
      out[#out + 1] = prefix .. name
      out[#out + 1] = shown(name, row[position])
    end
  end
end
local out = reply('found')
list(P, record, '', out)
list(L, record[P.policy], 'policy.', out)
for number, attempt in ipairs(record[P.attempts]) do
  list(A, attempt, 'attempt.' .. number .. '.', out)
end
for place, event in ipairs(record[P.events]) do
  list({ at_ms = 1, event = 2, attempt = 3, actor = 4, detail = 5 }, event, 'event.' .. place .. '.', out)
end
return out
