#!lua
--[[
dedup_batch: say of each id of a batch whether it is seen for the first time within the window, and remember it.

An id is looked for in every generation of buckets that reaches into the window, and added to the running one if it is in none.
Redis refuses the call before its first line when it is out of memory; one that cannot be completed for another reason takes back
what it wrote. So an id is remembered only by a call whose verdicts are kept too, and a lost reply never turns a first id into a
duplicate.

Sent again while its verdicts are kept, it is answered with them and changes nothing.

KEYS
  [1] shard     STRING, what is known of the stream in this shard (docs/PROTOCOL.md); the HASHes of the buckets have its name,
                ":", their generation's begin_ms, ":" and the binary digits before the last 14: which they are depends on it
  [2] verdicts  STRING, those of this batch: its fingerprint, and a verdict an id
ARGV
  [1] echo         16 bytes, the batch's token
  [2] fingerprint  16 bytes, of all ids of the batch
  [3] window_ms    an id is remembered at least so long, 1 or more
  [4] slice_ms     of the window, 1 or more
  [5] expected     ids of a window in this shard, as long as none has told
  [6] keep_ms      how long the verdicts are kept, 1 or more
  [7] ids          31 bytes each, in order: 24 binary digits as text, 7 bytes that are stored
REPLY { status, script, echo, detail… }
  checked, verdicts    of each id: 1 for the first time, 0 for a duplicate
  repeated, verdicts   the same, as an earlier call with this token was told them
  conflict             an earlier call with this token had other ids; nothing changed
WRITES the buckets of the new ids, then the shard, then the verdicts, if the reply is "checked"
COST   O(ids × generations, of which there is one as a rule), plus the bytes of their buckets, some hundred each
]]
ECHO = ARGV[1]
local fingerprint, ids = ARGV[2], ARGV[7]
local window, slice_ms = number_of(ARGV[3], 'window_ms'), number_of(ARGV[4], 'slice_ms')
local expected, keep = number_of(ARGV[5], 'expected'), number_of(ARGV[6], 'keep_ms')
if #fingerprint ~= 16 or window < 1 or slice_ms < 1 or keep < 1 or #ids % DEDUP_ID_BYTES ~= 0 then
  fault('BADARG', 'fingerprint is 16 bytes, an id 31; window_ms, slice_ms and keep_ms are 1 or more')
end
local kept = redis.call('GET', KEYS[2])
if kept then
  if string.sub(kept, 1, 16) ~= fingerprint then
    return reply('conflict')
  end
  return reply('repeated', string.sub(kept, 17))
end
local verdicts = dedup_remember(KEYS[1], KEYS[2], fingerprint, clock(), window, slice_ms, expected, keep, ids, {}, nil)
return reply('checked', verdicts)
