#!lua flags=allow-oom
--[[
report_call: tell the fleet how calls to a provider went; enough failures open its breaker, a probe closes it or opens it again.

Evidence counts only for the generation under which its calls were admitted: every opening and closing begins a new one. So a call
that fails late cannot make a breaker stay open longer or shorter, and one that succeeds late cannot close it. Only the probe that
holds the place may decide about an open breaker.

A caller that lost our reply sends the same call again and is answered "repeated": the last REPORTS_MAX reports are known again.

KEYS
  [1] guard     HASH, what is known of the provider (docs/PROTOCOL.md)
ARGV
  [1] token           16 bytes, new for each report
  [2] place           of the breaker, as admit_call told; '' without a breaker
  [3] generation      as admit_call told
  [4] calls           of that generation that are over, 0 or more
  [5] failures        of these
  [6] leading         failures before the first success
  [7] longest         failures in a row
  [8] trailing        failures after the last success
  [9] probe           the token of a probe that is over, '' for none; [4] to [8] do not count then
  [10] outcome        of the probe: "succeeded", "failed" or "given_back" (nothing was sent, nothing is known); '' for none
  [11] consecutive    failures in a row that open the breaker; 0 for any number
  [12] ratio          failures of 1000 calls that open it; 0 for any
  [13] calls_min      calls in the window before the ratio counts
  [14] window_ms      how far back the ratio looks, 1 or more
  [15] open_ms        how long it is open; doubles each time a probe fails
  [16] open_max_ms    how long at most, open_ms or more
  [17] probe_lease_ms how long a probe keeps others from probing
  [18] hold_ms        how long the provider wants to be left alone, 0 for not
  [19] hold_max_ms    the longest that it may hold callers off
REPLY { status, script, token, detail… }
  reported, stands, wait_ms, generation, opened   it counted
  repeated, stands, wait_ms, generation, opened   an earlier call with this token did the same
  stale, stands, wait_ms, generation, opened      the calls are of another generation, or the breaker is no longer kept
                                                  stands: closed, open, half_open or hold; opened: "yes" by this call, else "no"
WRITES the guard, once, unless the reply is "repeated", or nothing was told that counts
COST   O(1)
]]
local token, place = ARGV[1], ARGV[2]
ECHO = token
if #token ~= 16 then
  fault('BADARG', 'token is 16 bytes')
end
local generation, probe, outcome = number_of(ARGV[3], 'generation'), ARGV[9], ARGV[10]
local calls, failures = number_of(ARGV[4], 'calls'), number_of(ARGV[5], 'failures')
local leading, longest, trailing = number_of(ARGV[6], 'leading'), number_of(ARGV[7], 'longest'), number_of(ARGV[8], 'trailing')
local consecutive, ratio = number_of(ARGV[11], 'consecutive'), number_of(ARGV[12], 'ratio')
local calls_min, window = number_of(ARGV[13], 'calls_min'), number_of(ARGV[14], 'window_ms')
local open, open_max = number_of(ARGV[15], 'open_ms'), number_of(ARGV[16], 'open_max_ms')
local probe_lease = number_of(ARGV[17], 'probe_lease_ms')
local hold, hold_max = number_of(ARGV[18], 'hold_ms'), number_of(ARGV[19], 'hold_max_ms')
if failures > calls or window < 1 or open_max < open then
  fault('BADARG', 'failures are calls, window_ms is 1 or more, open_max_ms is open_ms or more')
end
if (probe == '') ~= (outcome == '') then
  fault('BADARG', 'a probe has an outcome')
end

local now = clock()
local known = redis.call('HMGET', KEYS[1], 'hold_ms', 'reports', place)
local held, reports = tonumber(known[1] or '0'), known[2] or ''
local breaker = place ~= '' and known[3] and unpack_breaker(known[3]) or nil

-- Where things stand when this call is over.
local function stands()
  local word, wait = 'closed', 0
  if breaker then
    word, wait = standing(breaker, now, probe_lease)
  end
  if word == 'closed' and is_ahead(held, now, hold_max) then
    word, wait = 'hold', held - now
  end
  return word, text(wait), text(breaker and breaker[B.generation] or 0)
end

local name = token:sub(1, 8)
for i = 1, #reports, 8 do
  if reports:sub(i, i + 7) == name then
    local word, wait, of = stands()
    return reply('repeated', word, wait, of, 'no')
  end
end

local fields = {}
if hold > 0 then
  local longer = now + math.min(hold, hold_max)
  held = is_ahead(held, now, hold_max) and math.max(held, longer) or longer
  fields[#fields + 1], fields[#fields + 2] = 'hold_ms', text(held)
end

local counts, opened = true, 'no'
if place == '' or (calls == 0 and probe == '') then
  counts = place == '' or (breaker ~= nil and breaker[B.generation] == generation)
elseif not breaker then
  counts = false
elseif probe ~= '' then
  counts = breaker[B.state] == 'open' and breaker[B.probe] == probe
  if counts and outcome == 'succeeded' then
    breaker = new_breaker(math.max(breaker[B.generation] + 1, now))
    breaker[B.seen_ms] = now
  elseif counts and outcome == 'failed' then
    open_breaker(breaker, now, math.max(math.min(2 * breaker[B.open_ms], open_max), open))
    opened = 'yes'
  elseif counts then
    breaker[B.probe], breaker[B.probe_lease_ms] = '', 0
  end
elseif breaker[B.state] == 'closed' and breaker[B.generation] == generation then
  local run = failures == calls and breaker[B.run] + failures or math.max(breaker[B.run] + leading, longest)
  breaker[B.run] = failures == calls and run or trailing
  breaker[B.seen_ms] = now
  local slice = math.floor(now * SLICES / window)
  local passed = slice - breaker[B.slice]
  if passed < 0 or passed > SLICES then
    passed = SLICES   -- nothing for so long, or a clock that was set back: it begins anew
  end
  breaker[B.slice] = slice
  local all, failed = 0, 0
  for _, list in ipairs({ breaker[B.calls], breaker[B.failures] }) do
    for _ = 1, passed do
      table.insert(list, 1, 0)
    end
    for i = #list, SLICES + 1, -1 do
      list[i] = nil
    end
    list[1] = (list[1] or 0) + (list == breaker[B.calls] and calls or failures)
  end
  for i = 1, #breaker[B.calls] do
    all, failed = all + breaker[B.calls][i], failed + breaker[B.failures][i]
  end
  local too_many = ratio > 0 and all >= math.max(calls_min, 1) and failed * 1000 >= ratio * all
  if failures > 0 and ((consecutive > 0 and run >= consecutive) or too_many) then
    open_breaker(breaker, now, open)
    opened = 'yes'
  end
else
  counts = false
end

local news = counts and breaker and (calls > 0 or probe ~= '')
if news then
  fields[#fields + 1], fields[#fields + 2] = place, cmsgpack.pack(breaker)
end
if #fields > 0 then
  fields[#fields + 1], fields[#fields + 2] = 'reports', (name .. reports):sub(1, 8 * REPORTS_MAX)
  redis.call('HSET', KEYS[1], unpack(fields))
  redis.call('PEXPIRE', KEYS[1], text(GUARD_LIFE_MS))
end
local word, wait, of = stands()
if not counts then
  return reply('stale', word, wait, of, opened)
end
return reply('reported', word, wait, of, opened)
