-- What the scripts about mirrored streams share: those of which whoever asks has a copy. docs/PROTOCOL.md, "Mirrored streams", says
-- what stands in Redis.

local MIRROR_ID_BYTES = 10   -- of an id, which are kept
local MIRROR_HEAD_BYTES = 14   -- in front of the ids of a frame: their number, and the digest of what is before it
local MIRROR_DIGEST_BYTES = 12
local MIRROR_TAIL_BYTES_MAX = 65536   -- who lacks more than this reads it first: a call looks through no more
local MIRROR_CHUNK_BYTES_MAX = 16760832   -- a chunk with so many is followed by another one; with a last frame it takes 16 MiB
local MIRROR_FEW_BYTES = 1000   -- so few ids are looked for in the frames one by one

-- What is known of a mirrored stream in one shard. The last two are of its running chunk: the slice that it was begun with, and the
-- longest window of those who have added to it.
local M = { schema = 1, added_ms = 2, digest = 3, chunks = 4, slice_ms = 5, window = 6 }
-- One chunk of its log, the running one last.
local C = { number = 1, end_ms = 2, bytes = 3, ids = 4 }

local function mirror_key(key, chunk)
  return key .. ':m:' .. text(chunk[C.number])
end

-- What is known of a shard, brought to this moment, and the stream's time.
local function mirror_shard(key, now, window, slice_ms)
  local packed = redis.call('GET', key)
  local shard = packed and cmsgpack.unpack(packed) or { MIRROR_SCHEMA, 0, string.rep('0', MIRROR_DIGEST_BYTES), {}, slice_ms, 0 }
  dedup_schema(shard[M.schema], MIRROR_SCHEMA)
  local chunks = shard[M.chunks]
  local running = chunks[#chunks]
  if running and now + shard[M.added_ms] < running[C.end_ms] - 2 * shard[M.slice_ms] then
    -- Redis' clock was set back by more than a slice, and this one would not end in time: from here on its time is told on.
    shard[M.added_ms] = running[C.end_ms] - shard[M.slice_ms] - now
  end
  local told = now + shard[M.added_ms]
  local over = not running or told >= running[C.end_ms] or running[C.bytes] >= MIRROR_CHUNK_BYTES_MAX
  -- What Redis lost of a chunk nobody brings back; what follows must not stand behind a gap.
  if over or redis.call('STRLEN', mirror_key(key, running)) < running[C.bytes] then
    chunks[#chunks + 1] = { running and running[C.number] + 1 or 1, told + slice_ms, 0, 0 }
    shard[M.slice_ms], shard[M.window] = slice_ms, 0
  end
  while chunks[1][C.end_ms] + window <= told do
    table.remove(chunks, 1)
  end
  return shard, told
end

-- The frames behind what a caller has read, '' if there are none; nil if it is not what stands here, or too far behind. A caller
-- that has read nothing has the chunk 0: where everything before the running chunk is forgotten, it lacks no more than others. Where
-- nothing stands in that one, who has read all is known by the digest: the chunk that it read last may be forgotten.
local function mirror_tail(key, shard, number, offset, digest)
  local chunks = shard[M.chunks]
  local running, before = chunks[#chunks], chunks[#chunks - 1]
  local from = number == running[C.number] and offset
    or (before and number == before[C.number] and offset == before[C.bytes] and 0)
    or (not before and number < running[C.number] and 0)
    or (number > 0 and running[C.bytes] == 0 and 0)
  local bytes = from and running[C.bytes] - from
  if not from or bytes < 0 or bytes > MIRROR_TAIL_BYTES_MAX then
    return nil
  end
  local tail = bytes > 0 and redis.call('GETRANGE', mirror_key(key, running), text(from), text(running[C.bytes] - 1)) or ''
  local here = bytes > 0 and string.sub(tail, 3, MIRROR_HEAD_BYTES) or shard[M.digest]
  if number > 0 and here ~= digest then
    return nil
  end
  return tail
end

-- What says of an id whether it stands in frames: of one of these. It finds also what begins inside of another id: that is as likely
-- as that two ids are the same.
local function mirror_finder(frames, ids)
  if #ids <= MIRROR_FEW_BYTES then
    return function(id)
      return string.find(frames, id, 1, true)
    end
  end
  local found, at = {}, 1
  while at <= #frames do
    local high, low = string.byte(frames, at, at + 1)
    at = at + MIRROR_HEAD_BYTES
    for _ = 1, high * 256 + low do
      found[string.sub(frames, at, at + MIRROR_ID_BYTES - 1)] = true
      at = at + MIRROR_ID_BYTES
    end
  end
  return function(id)
    return found[id]
  end
end

-- Gives back what was set aside for a chunk that has ended to be longer.
local function mirror_trim(chunk)
  local copy = chunk .. ':copy'
  if redis.call('COPY', chunk, copy) == 1 then
    redis.call('RENAME', copy, chunk)
  end
end

-- What a call about a mirrored stream is asked, checked: its ids are those that its verdicts have a 1 for.
local function mirror_arguments(fingerprint, verdicts, ids, digest)
  local _, ones = string.gsub(verdicts, '1', '')
  if #fingerprint ~= 16 or #ids ~= ones * MIRROR_ID_BYTES or string.find(verdicts, '[^01]') or #digest ~= MIRROR_DIGEST_BYTES then
    fault('BADARG', 'fingerprint is 16 bytes, digest 12; verdicts has a 0, or a 1 and an id of 10 bytes, for each id')
  end
end

-- The shard and the time of the stream, and the tail, for a caller that has read so far; nil for the tail if it must read first, or
-- if it knows an id from a chunk that is forgotten.
local function mirror_open(key, now, window, slice_ms, number, offset, digest, oldest)
  local shard, told = mirror_shard(key, now, window, slice_ms)
  local forgotten = oldest > 0 and oldest < shard[M.chunks][1][C.number]
  return shard, told, not forgotten and mirror_tail(key, shard, number, offset, digest) or nil
end

-- The verdicts and the ids without those that `drop` says of, by id and place among the ids, that they are to have another verdict.
local function mirror_without(verdicts, ids, drop)
  local kept, at = {}, 1
  local changed = string.gsub(verdicts, '1', function()
    local id = string.sub(ids, at, at + MIRROR_ID_BYTES - 1)
    local other = drop(id, (at - 1) / MIRROR_ID_BYTES + 1)
    at = at + MIRROR_ID_BYTES
    if not other then
      kept[#kept + 1] = id
    end
    return other or '1'
  end)
  return changed, table.concat(kept)
end

-- Adds the ids to the log, does what else belongs to it and keeps the verdicts. What can fail is first, and what the log has got
-- counts only by what is written last.
local function mirror_remember(key, verdicts_key, fingerprint, shard, told, window, keep, verdicts, ids, also)
  local running = shard[M.chunks][#shard[M.chunks]]
  local ttl = text(running[C.end_ms] - told + window + DEDUP_MARGIN_MS)
  local began = running[C.bytes]
  if ids ~= '' then
    local count = #ids / MIRROR_ID_BYTES
    local frame = string.char(math.floor(count / 256), count % 256) .. shard[M.digest] .. ids
    local chunk = mirror_key(key, running)
    redis.call('SETRANGE', chunk, text(began), frame)
    if window > shard[M.window] then
      redis.call('PEXPIRE', chunk, ttl)
      shard[M.window] = window
    end
    if began == 0 then
      local before = shard[M.chunks][#shard[M.chunks] - 1]
      if before then
        mirror_trim(mirror_key(key, before))
      end
    end
    running[C.bytes], running[C.ids] = began + #frame, running[C.ids] + count
    -- With the time: what a master lost and is told again is not what somebody may have read of it in part.
    local time = redis.call('TIME')
    local all = shard[M.digest] .. ECHO .. fingerprint .. verdicts .. time[1] .. ' ' .. time[2]
    shard[M.digest] = string.sub(redis.sha1hex(all), 1, MIRROR_DIGEST_BYTES)
  end
  if also then
    also()
  end
  redis.call('SET', verdicts_key, fingerprint .. verdicts, 'PX', text(keep))
  redis.call('SET', key, cmsgpack.pack(shard), 'PX', ttl)
end

-- What a caller is told so that it has read everything: the oldest chunk, the running one, where its own frame began, what follows.
local function mirror_news(shard, began, tail)
  local chunks = shard[M.chunks]
  return text(chunks[1][C.number]), text(chunks[#chunks][C.number]), text(began), shard[M.digest], tail
end
