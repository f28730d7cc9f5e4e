-- What the scripts about clicks share. docs/PROTOCOL.md, "Clicks", says what stands in Redis.

local DEDUP_SCHEMA = 2
local MIRROR_SCHEMA = 3
local DEDUP_BITS_MAX = 24   -- binary digits of an id that choose its bucket, as text
local DEDUP_STORED_BYTES = 7   -- of an id, which are kept in its bucket
local DEDUP_ID_BYTES = 31   -- an id as it comes: the digits, then what is stored
local DEDUP_HASH_BITS = 14   -- the last digits name a bucket in a HASH, those before them the HASH: small enough to vanish at once
local DEDUP_BUCKET_IDS = 32   -- ids that a bucket is meant to have at most, on average; half of it at least
local DEDUP_FULL_IDS = 64   -- with more on average another generation begins that has more buckets
local DEDUP_THIN_IDS = 2   -- with less on average, after a window, one that has fewer
local DEDUP_SMALL_BITS = 10   -- a generation with so many digits in use is never too large
local DEDUP_SLICE_MAX = 250   -- the last slice of a generation: its number is one byte
local DEDUP_GENERATIONS_MAX = 8   -- generations that are looked at; with so many none is begun because one is too full
local DEDUP_GROWTH_MAX = 16   -- a generation that follows one that is too full is made for so many times its ids at most
local DEDUP_FIELDS_MAX = 60   -- buckets that are read at once: so many fit the buffer of a reply, and what does not is copied
local DEDUP_LAPSED_MAX = 2000   -- lapsed claims that one call takes away: more than one makes
local DEDUP_MARGIN_MS = 1000   -- what is stored outlives the window by so much

-- What is known of a stream in one shard.
local D = { schema = 1, added_ms = 2, generations = 3 }
-- One generation of buckets; `ids` are those added in its slices, the running slice first, as far as the window reaches.
local G = { begin_ms = 1, slice_ms = 2, bits = 3, slice = 4, ids = 5 }

-- A generation that is made for so many ids.
local function dedup_generation(begin_ms, slice_ms, ids)
  local bits = 0
  while bits < DEDUP_BITS_MAX and ids > DEDUP_BUCKET_IDS * 2 ^ bits do
    bits = bits + 1
  end
  return { begin_ms, slice_ms, bits, 0, { 0 } }
end

-- The first slice of a generation whose end is within the window: ids of earlier ones are forgotten.
local function dedup_lowest(generation, told, window)
  return math.max(0, math.floor((told - window - generation[G.begin_ms]) / generation[G.slice_ms]))
end

-- How many ids a window will have, from what the running generation has had; `expected` where it cannot tell.
local function dedup_forecast(running, told, window, slice_ms, lowest, live, expected)
  if lowest > running[G.slice] then
    return expected
  end
  local from = running[G.begin_ms] + math.max(lowest, running[G.slice] - #running[G.ids] + 1) * running[G.slice_ms]
  local ids = live * math.min((window + slice_ms) / math.max(told - from, 1), DEDUP_GROWTH_MAX)
  return told - from < window and math.max(ids, expected) or ids
end

-- Brings what is known of a shard to this moment: the running slice, and a new generation where one is due. Returns the stream's
-- time, how long what is written now must live, and whether a slice has begun.
local function dedup_turn(shard, now, window, slice_ms, expected)
  local generations = shard[D.generations]
  local running = generations[#generations]
  if not running then
    running = dedup_generation(now, slice_ms, expected)
    generations[1] = running
  end
  local began = running[G.begin_ms] + running[G.slice] * running[G.slice_ms]
  if now + shard[D.added_ms] < began - running[G.slice_ms] then
    -- Redis' clock was set back by more than a slice, and this one would not end in time: from here on its time is told on.
    shard[D.added_ms] = began - now
  end
  local told = now + shard[D.added_ms]
  local slice = math.max(running[G.slice], math.floor((told - running[G.begin_ms]) / running[G.slice_ms]))
  local begins = slice > running[G.slice]
  local lowest = dedup_lowest(running, told, window)
  local live = 0
  for back, ids in ipairs(running[G.ids]) do
    live = running[G.slice] - back + 1 >= lowest and live + ids or live
  end
  local buckets = 2 ^ running[G.bits]
  local other = live > DEDUP_FULL_IDS * buckets and told > running[G.begin_ms] and running[G.bits] < DEDUP_BITS_MAX
  if begins and not other then
    other = running[G.slice_ms] ~= slice_ms or (lowest > 0 and running[G.bits] > DEDUP_SMALL_BITS and live < DEDUP_THIN_IDS * buckets)
  end
  if slice > DEDUP_SLICE_MAX or (other and #generations < DEDUP_GENERATIONS_MAX) then
    local ids = dedup_forecast(running, told, window, slice_ms, lowest, live, expected)
    running = dedup_generation(told, slice_ms, ids)
    generations[#generations + 1] = running
    begins = false
  elseif begins then
    for _ = running[G.slice] + 1, slice do
      table.insert(running[G.ids], 1, 0)
    end
    running[G.slice] = slice
  end
  for back = #running[G.ids], 2, -1 do
    if running[G.slice] - back + 1 < lowest then
      running[G.ids][back] = nil
    end
  end
  for g = #generations - 1, 1, -1 do
    if dedup_lowest(generations[g], told, window) > generations[g][G.slice] then
      table.remove(generations, g)
    end
  end
  local ends = running[G.begin_ms] + (running[G.slice] + 1) * running[G.slice_ms]
  return told, ends - told + window + DEDUP_MARGIN_MS, begins
end

-- Refuses a shard that another kind of stream has written, or another version.
local function dedup_schema(found, expected)
  if found ~= expected then
    local is = found == MIRROR_SCHEMA and ': the stream is mirrored' or found == DEDUP_SCHEMA and ': the stream is not mirrored' or ''
    fault('BADSCHEMA', 'the shard has schema ' .. tostring(found) .. ', this script reads ' .. expected .. is)
  end
end

-- What is known of a stream in one shard, brought to this moment, and what dedup_turn returns.
local function dedup_shard(key, now, window, slice_ms, expected)
  local packed = redis.call('GET', key)
  local shard = packed and cmsgpack.unpack(packed) or { DEDUP_SCHEMA, 0, {} }
  dedup_schema(shard[D.schema], DEDUP_SCHEMA)
  return shard, dedup_turn(shard, now, window, slice_ms, expected)
end

local function dedup_base(key, generation)
  return key .. ':' .. text(generation[G.begin_ms]) .. ':'
end

-- The ids of a bucket that are not forgotten. They stand in the order in which they came, each with the number of its slice behind it.
local function dedup_live(bucket, lowest)
  local byte = string.byte
  if byte(bucket, DEDUP_STORED_BYTES + 1) >= lowest then
    return bucket
  end
  local cell = DEDUP_STORED_BYTES + 1
  local at = 2 * cell
  while at <= #bucket and byte(bucket, at) < lowest do
    at = at + cell
  end
  return string.sub(bucket, at - cell + 1)
end

-- Whether an id stands in a bucket: a hit that begins inside of another one is none.
local function dedup_has(bucket, id)
  local at = string.find(bucket, id, 1, true)
  while at and at % (DEDUP_STORED_BYTES + 1) ~= 1 do
    at = string.find(bucket, id, at + 1, true)
  end
  return at ~= nil
end

-- Marks in `seen` the ids that a generation has. With `written` it adds the others to it, and what it changes is put there as it was.
-- The ids must be in order, or two of one bucket could overwrite each other.
local function dedup_visit(base, generation, lowest, ids, seen, ttl, written)
  local sub, digits, width, stored = string.sub, generation[G.bits], DEDUP_ID_BYTES, DEDUP_STORED_BYTES
  local prefix = math.max(0, digits - DEDUP_HASH_BITS)
  local stamp = string.char(generation[G.slice])
  local n, at, before = 1, 1, ''
  while at <= #ids do
    local name = sub(ids, at, at + prefix - 1)
    local fields, first, count, last = {}, {}, 0, nil
    while at <= #ids do
      local field = sub(ids, at + prefix, at + digits - 1)
      local of = prefix == 0 and name or sub(ids, at, at + prefix - 1)
      if of ~= name or (field ~= last and count == DEDUP_FIELDS_MAX) then
        break
      elseif field ~= last then
        if last and field < last then
          fault('BADARG', 'the ids are not in order')
        end
        count, last = count + 1, field
        fields[count], first[count] = field, n
      end
      n, at = n + 1, at + width
    end
    if name .. fields[1] <= before and before ~= '' then
      fault('BADARG', 'the ids are not in order')
    end
    before = name .. last
    first[count + 1] = n
    local key = base .. name
    local buckets = redis.call('HMGET', key, unpack(fields))
    local changed, changes, is_new = {}, 0, true
    for f = 1, count do
      local bucket = buckets[f]
      is_new = is_new and not bucket
      bucket = bucket and dedup_live(bucket, lowest) or ''
      local added = bucket
      for each = first[f], first[f + 1] - 1 do
        if not seen[each] then
          local from = each * width - stored + 1
          local id = sub(ids, from, from + stored - 1)
          if dedup_has(bucket, id) then
            seen[each] = true
          elseif written then
            added = added .. id .. stamp
          end
        end
      end
      if added ~= bucket then
        changed[changes + 1], changed[changes + 2] = fields[f], added
        changes = changes + 2
      end
    end
    if changes > 0 then
      written[#written + 1] = { key, fields, buckets }
      redis.call('HSET', key, unpack(changed))
      if is_new then
        redis.call('PEXPIRE', key, text(ttl))
      end
    end
  end
end

-- Looks for ids in every generation, the running one last, and says which were seen. With `written` those that were not are added.
local function dedup_ids(key, shard, told, window, ids, seen, ttl, written)
  local generations = shard[D.generations]
  for g, generation in ipairs(generations) do
    local lowest = dedup_lowest(generation, told, window)
    dedup_visit(dedup_base(key, generation), generation, lowest, ids, seen, ttl, g == #generations and written or nil)
  end
end

-- Lets the HASHes of the running generation live as long as its slice that has begun needs them.
local function dedup_prolong(key, shard, ttl)
  local running = shard[D.generations][#shard[D.generations]]
  local names = { '' }
  for _ = DEDUP_HASH_BITS + 1, running[G.bits] do
    for n = 1, #names do
      names[n], names[#names + 1] = names[n] .. '0', names[n] .. '1'
    end
  end
  for _, name in ipairs(names) do
    redis.call('PEXPIRE', dedup_base(key, running) .. name, text(ttl))
  end
end

-- Takes back what a call has written that cannot be completed: the same call again must find what it found.
local function dedup_undo(written)
  for w = #written, 1, -1 do
    local key, fields, buckets = unpack(written[w])
    for f = 1, #fields do
      if buckets[f] then
        redis.pcall('HSET', key, fields[f], buckets[f])
      else
        redis.pcall('HDEL', key, fields[f])
      end
    end
  end
end

-- Remembers the ids that are not in `seen`, with the verdicts, and does what else belongs to it; or takes all of it back.
local function dedup_remember(key, verdicts_key, fingerprint, now, window, slice_ms, expected, keep, ids, seen, also)
  local shard, told, ttl, begins = dedup_shard(key, now, window, slice_ms, expected)
  local written, verdicts = {}, {}
  local done, problem = pcall(function()
    if begins then
      dedup_prolong(key, shard, ttl)
    end
    dedup_ids(key, shard, told, window, ids, seen, ttl, written)
    local new = 0
    for n = 1, #ids / DEDUP_ID_BYTES do
      verdicts[n] = seen[n] and '0' or '1'
      new = new + (seen[n] and 0 or 1)
    end
    verdicts = table.concat(verdicts)
    local counts = shard[D.generations][#shard[D.generations]][G.ids]
    counts[1] = counts[1] + new
    redis.call('SET', key, cmsgpack.pack(shard), 'PX', text(ttl))
    redis.call('SET', verdicts_key, fingerprint .. verdicts, 'PX', text(keep))
    if also then
      also()
    end
  end)
  if not done then
    redis.pcall('DEL', verdicts_key)
    dedup_undo(written)
    error(problem)
  end
  return verdicts
end

-- The ids one by one, and whose claim of each stands.
local function dedup_holders(claims, ids, bytes, now)
  local records = {}
  for at = 1, #ids, bytes do
    records[#records + 1] = string.sub(ids, at, at + bytes - 1)
  end
  local holders = #records > 0 and redis.call('HMGET', claims, unpack(records)) or {}
  for n = 1, #records do
    local holder = holders[n]
    holders[n] = holder and tonumber(string.sub(holder, 17)) > now and string.sub(holder, 1, 16)
  end
  return records, holders
end

-- Writes claims down, and takes those away that have lapsed.
local function dedup_hold(claims, lapses, fields, scores, now, lease)
  local lapsed = redis.call('ZRANGEBYSCORE', lapses, '-inf', text(now), 'LIMIT', 0, DEDUP_LAPSED_MAX)
  if #lapsed > 0 then
    redis.call('HDEL', claims, unpack(lapsed))
    redis.call('ZREM', lapses, unpack(lapsed))
  end
  if #fields > 0 then
    redis.call('HSET', claims, unpack(fields))
    redis.call('ZADD', lapses, unpack(scores))
    for _, key in ipairs({ claims, lapses }) do
      if redis.call('PTTL', key) < lease then
        redis.call('PEXPIRE', key, text(lease + DEDUP_MARGIN_MS))
      end
    end
  end
end
