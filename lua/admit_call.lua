#!lua
--[[
admit_call: decide whether a provider may be called now, by what the whole fleet knows of it.

Hold, breaker, permits and rate are looked at together, at one moment, and nothing is taken unless all of them allow the call. A
breaker whose time is over lets one probe pass, under a lease: of any number of callers one is told "probe", and if it is never
heard of again the next one is, when its lease has lapsed. A permit whose holder died is free when its lease has lapsed.

A caller that lost our reply sends the same call again: a permit or a probe that is its own already is told again. A turn of the
rate alone has no name, and may be taken twice: then fewer calls pass than might, never more.

KEYS
  [1] guard     HASH, what is known of the provider (docs/PROTOCOL.md)
  [2] permits   ZSET, token → until when it is taken, in ms
ARGV
  [1] token           16 bytes, new for each call
  [2] model           16 hexadecimal digits, '' for none
  [3] breaker         "on" or "off"
  [4] probe_lease_ms  how long a probe keeps others from probing, 1 or more
  [5] permits_max     calls of the fleet at once; 0 for no limit
  [6] lease_ms        how long a permit is kept without being extended, 1 or more
  [7] interval_us     between two calls of the fleet, in microseconds; 0 for no limit
  [8] burst           calls that may come at once after a pause, 1 or more
  [9] hold_max_ms     the longest that a provider may hold callers off
REPLY { status, script, token, detail… }
  admitted, kind, generation, place, permits   kind is "call" or "probe"; both go into the report, with place; permits taken now
  refused, why, wait_ms, place                 hold, breaker, probe, permits or rate; when to ask again, 0 for nobody knows
WRITES permits and guard, once each and last, if the reply is "admitted"; lapsed permits are taken away with them
COST   O(log permits), and for a model that is new to a full guard O(MODELS_MAX)
]]
local token, model = ARGV[1], ARGV[2]
ECHO = token
if #token ~= 16 or (#model ~= 16 and model ~= '') or (ARGV[3] ~= 'on' and ARGV[3] ~= 'off') then
  fault('BADARG', 'token is 16 bytes, model 16 or none, breaker on or off')
end
local probe_lease, lease = number_of(ARGV[4], 'probe_lease_ms'), number_of(ARGV[6], 'lease_ms')
local permits_max, interval = number_of(ARGV[5], 'permits_max'), number_of(ARGV[7], 'interval_us')
local burst, hold_max = number_of(ARGV[8], 'burst'), number_of(ARGV[9], 'hold_max_ms')
if probe_lease < 1 or lease < 1 or burst < 1 then
  fault('BADARG', 'probe_lease_ms, lease_ms and burst must be 1 or more')
end
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)

local place = 'model:' .. model
local known = redis.call('HMGET', KEYS[1], 'hold_ms', 'rate_us', place)
local hold = tonumber(known[1] or '0')
if is_ahead(hold, now, hold_max) then
  return reply('refused', 'hold', text(hold - now), place)
end

local breaker, kind, generation, idle = nil, 'call', 0, nil
if ARGV[3] == 'on' then
  local packed = known[3]
  if not packed and redis.call('HLEN', KEYS[1]) >= MODELS_MAX then
    -- Full: of those that nobody asked for one goes; else the rest share one.
    local all = redis.call('HGETALL', KEYS[1])
    for i = 1, #all, 2 do
      local other = all[i]:sub(1, 6) == 'model:' and unpack_breaker(all[i + 1])
      if other and other[B.state] == 'closed' and not is_ahead(other[B.seen_ms] + MODEL_IDLE_MS, now, MODEL_IDLE_MS) then
        idle = all[i]
      end
    end
    if not idle then
      place = 'model:rest'
      packed = redis.call('HGET', KEYS[1], place)
    end
  end
  breaker = packed and unpack_breaker(packed) or new_breaker(now)
  local stands, wait = standing(breaker, now, probe_lease)
  if stands == 'open' then
    return reply('refused', 'breaker', text(wait), place)
  end
  if stands == 'half_open' then
    if wait > 0 and breaker[B.probe] ~= token then
      return reply('refused', 'probe', text(wait), place)
    end
    kind = 'probe'
  end
  generation = breaker[B.generation]
  if packed and kind == 'call' then
    breaker = nil   -- nothing to write
  end
end

local taken, mine = 0, false
if permits_max > 0 then
  taken = redis.call('ZCOUNT', KEYS[2], '(' .. text(now), '+inf')
  mine = redis.call('ZSCORE', KEYS[2], token)
  if not mine and taken >= permits_max then
    return reply('refused', 'permits', '0', place)
  end
end
local turn_us = nil
if interval > 0 and not mine then
  -- The theoretical arrival time of GCRA (ITU-T I.371). One that a clock set back left too far ahead is cut.
  local arrival = math.min(math.max(tonumber(known[2] or '0'), now_us), now_us + burst * interval)
  local early = arrival - now_us - (burst - 1) * interval
  if early > 0 then
    return reply('refused', 'rate', text(math.floor((early + 999) / 1000)), place)
  end
  turn_us = arrival + interval
end

if permits_max > 0 and not mine then
  local lapsed = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', text(now), 'LIMIT', 0, LAPSED_MAX)
  if #lapsed > 0 then
    redis.call('ZREM', KEYS[2], unpack(lapsed))
  end
  redis.call('ZADD', KEYS[2], text(now + lease), token)
  if redis.call('PTTL', KEYS[2]) < lease then
    redis.call('PEXPIRE', KEYS[2], text(2 * lease))
  end
  taken = taken + 1
end
local fields = {}
if breaker then
  if kind == 'probe' and breaker[B.probe] ~= token then
    breaker[B.probe], breaker[B.probe_lease_ms] = token, now + probe_lease
  end
  fields[#fields + 1], fields[#fields + 2] = place, cmsgpack.pack(breaker)
end
if turn_us then
  fields[#fields + 1], fields[#fields + 2] = 'rate_us', text(turn_us)
end
if #fields > 0 then
  if idle then
    redis.call('HDEL', KEYS[1], idle)
  end
  redis.call('HSET', KEYS[1], unpack(fields))
  redis.call('PEXPIRE', KEYS[1], text(GUARD_LIFE_MS))
end
return reply('admitted', kind, text(generation), place, text(taken))
