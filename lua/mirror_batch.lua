#!lua
--[[
mirror_batch: say of each id of a batch whether it is seen for the first time, and remember it, for a caller with a copy.

The caller has a copy of what is remembered, and says how far it reaches and which of the ids are in it. What was added since is
looked through here, so that nobody else's click is overlooked; a copy that is not the beginning of what stands here, that lacks too
much, or whose evidence is forgotten, changes nothing. Redis refuses the call before its first line when it is out of memory. An id
is remembered only by a call whose verdicts are kept too.

Sent again while its verdicts are kept, it is answered with them and changes nothing, whatever the caller has read meanwhile.

KEYS
  [1] shard     STRING, what is known of the stream in this shard (docs/PROTOCOL.md); the STRINGs of its log have its name, ":m:" and
                the number of the chunk
  [2] verdicts  STRING, those of this batch: its fingerprint, and a verdict an id
ARGV
  [1] echo         16 bytes, the batch's token
  [2] fingerprint  16 bytes, of all ids of the batch
  [3] window_ms    an id is remembered at least so long, 1 or more
  [4] slice_ms     of the window, 1 or more
  [5] keep_ms      how long the verdicts are kept, 1 or more
  [6] chunk        up to which the caller has read; 0 if it has read nothing
  [7] offset       how many bytes of it
  [8] digest       12 bytes, of everything up to there
  [9] oldest       the oldest chunk that one of the caller's duplicates is in, 0 if there are none
  [10] verdicts    the caller's: of each id of this call 0 if its copy has it, else 1
  [11] ids         10 bytes each, those with a 1
REPLY { status, script, echo, detail… }
  checked, verdicts, oldest, chunk, offset, digest, tail   of each id: 1 for the first time, 0 for a duplicate; the oldest chunk that
                       is not forgotten; where the ids of the 1s stand now, the digest behind them, the frames before them
  behind, oldest       the caller must read first; nothing changed
  repeated, verdicts   the same, as an earlier call with this token was told them
  conflict             an earlier call with this token had other ids; nothing changed
WRITES the running chunk, then the verdicts, then the shard, if the reply is "checked"
COST   O(bytes of the tail and of the ids); what a slice brings is a STRING, written at its end
]]
ECHO = ARGV[1]
local fingerprint, verdicts, ids = ARGV[2], ARGV[10], ARGV[11]
local window, slice_ms, keep = number_of(ARGV[3], 'window_ms'), number_of(ARGV[4], 'slice_ms'), number_of(ARGV[5], 'keep_ms')
local chunk, offset, oldest = number_of(ARGV[6], 'chunk'), number_of(ARGV[7], 'offset'), number_of(ARGV[9], 'oldest')
mirror_arguments(fingerprint, verdicts, ids, ARGV[8])
if window < 1 or slice_ms < 1 or keep < 1 then
  fault('BADARG', 'window_ms, slice_ms and keep_ms are 1 or more')
end
local kept = redis.call('GET', KEYS[2])
if kept then
  if string.sub(kept, 1, 16) ~= fingerprint then
    return reply('conflict')
  end
  return reply('repeated', string.sub(kept, 17))
end
local shard, told, tail = mirror_open(KEYS[1], clock(), window, slice_ms, chunk, offset, ARGV[8], oldest)
if not tail then
  return reply('behind', text(shard[M.chunks][1][C.number]))
end
if tail ~= '' then
  local found = mirror_finder(tail, ids)
  verdicts, ids = mirror_without(verdicts, ids, function(id)
    return found(id) and '0'
  end)
end
local began = shard[M.chunks][#shard[M.chunks]][C.bytes]
mirror_remember(KEYS[1], KEYS[2], fingerprint, shard, told, window, keep, verdicts, ids)
return reply('checked', verdicts, mirror_news(shard, began, tail))
