#!lua flags=allow-oom
--[[
issue_certificate: keep a certificate of a route and provider, live from now on.

What is issued never changes; only its standing does (mark_certificate). A renewal stands on the certificate that it renews: if
somebody suspended or revoked that one meanwhile, nothing is issued, whatever the renewal proved. Nor is it if any certificate of the
pair was suspended or revoked since the runs began: the new one would be the newer word, and undo it. The newest CERTIFICATES_MAX are
kept: the one that was issued first goes first, so that a word on a contract never goes before an older word on the same.

A caller that lost our reply sends the same call again and is answered "repeated".

KEYS
  [1] certificates  HASH, what was proved of the route and provider (docs/PROTOCOL.md)
ARGV
  [1] token        16 bytes, new for each call
  [2] id           the certificate's name, 32 hexadecimal digits
  [3] certificate  JSON, as issued
  [4] by           text, who had it issued
  [5] life_ms      how long it proves anything, 1 or more
  [6] renews       the id of the certificate that it renews, '' for none
  [7] since_ms     when the runs that it stands on began, Unix ms by Redis' clock; 0 or more
REPLY { status, script, token, detail… }
  issued          it is kept
  repeated        it was kept before; nothing changed
  refused         the one that it renews is not live any more, or one was suspended or revoked since since_ms; nothing changed
WRITES the certificates, if the reply is "issued"
COST   O(certificates + events)
]]
local token, id, certificate, by, life, renews = ARGV[1], ARGV[2], ARGV[3], ARGV[4], number_of(ARGV[5], 'life_ms'), ARGV[6]
local since = number_of(ARGV[7], 'since_ms')
ECHO = token
if #token ~= 16 or not id:match('^%x+$') or #id ~= 32 or certificate == '' or life < 1 then
  fault('BADARG', 'token is 16 bytes, id 32 hexadecimal digits, a certificate is JSON, life_ms is 1 or more')
end
if redis.call('HEXISTS', KEYS[1], 'certificate:' .. id) == 1 then
  return reply('repeated')
end
if renews ~= '' and redis.call('HGET', KEYS[1], 'standing:' .. renews) ~= 'live' then
  return reply('refused')
end
local events = certificate_events(KEYS[1])
for _, event in ipairs(events) do
  if since > 0 and event.at_ms >= since and (event.event == 'suspended' or event.event == 'revoked') then
    return reply('refused')
  end
end

local now = clock()
local ids = certificate_ids(KEYS[1])
table.insert(ids, 1, id)
local gone = {}
for i = #ids, CERTIFICATES_MAX + 1, -1 do
  for _, field in ipairs(CERTIFICATE_FIELDS) do
    gone[#gone + 1] = field .. ids[i]
  end
  ids[i] = nil
end
if #gone > 0 then
  redis.call('HDEL', KEYS[1], unpack(gone))
end
certificate_event(events, now, 'issued', id, by, '')
redis.call('HSET', KEYS[1], 'certificate:' .. id, certificate, 'standing:' .. id, 'live', 'by:' .. id, '', 'reason:' .. id, '',
  'ids', table.concat(ids, ' '), 'events', cjson.encode(events))
local left = redis.call('PTTL', KEYS[1])
redis.call('PEXPIRE', KEYS[1], text(math.max(left, life + CERTIFICATE_KEEP_MS)))
return reply('issued')
