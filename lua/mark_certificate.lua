#!lua flags=allow-oom
--[[
mark_certificate: suspend or revoke certificates of a route and provider, or take a suspension back.

The word counts from this moment for every gateway that reads the certificates. "revoked" is final; what is suspended may be live
again. A certificate that stands so already is left as it is, with the reason that stands.

A call that is sent again after its reply was lost changes nothing a second time, whatever was said in between.

KEYS
  [1] certificates  HASH, what was proved of the route and provider (docs/PROTOCOL.md)
ARGV
  [1] token     16 bytes, new for each call
  [2] id        the certificate's name, '' for every one that is kept
  [3] standing  "live", "suspended" or "revoked"
  [4] by        text, who says so
  [5] reason    text, why
REPLY { status, script, token, detail… }
  marked, count     so many stand otherwise than before
  repeated          they stand so already, or this very call was made before; nothing changed
  refused           revoked ones stay revoked; nothing changed
  not_found         no such certificate is kept
WRITES the certificates, if the reply is "marked"
COST   O(certificates + events)
]]
local token, wanted, standing, by, reason = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
ECHO = token
if #token ~= 16 or by == '' or (standing ~= 'live' and standing ~= 'suspended' and standing ~= 'revoked') then
  fault('BADARG', 'token is 16 bytes, somebody says so, standing is live, suspended or revoked')
end

local said = ('%02x'):rep(16):format(token:byte(1, 16))
local before = redis.call('HGET', KEYS[1], 'said') or ''
if before:find(said, 1, true) then
  return reply('repeated')
end

local now = clock()
local events, fields = certificate_events(KEYS[1]), {}
local found, refused, marked = false, false, 0
for _, id in ipairs(certificate_ids(KEYS[1])) do
  if wanted == '' or id == wanted then
    found = true
    local stands = redis.call('HGET', KEYS[1], 'standing:' .. id)
    if stands ~= standing then
      if stands == 'revoked' then
        refused = true
      else
        marked = marked + 1
        local n = #fields
        fields[n + 1], fields[n + 2] = 'standing:' .. id, standing
        fields[n + 3], fields[n + 4] = 'by:' .. id, standing == 'live' and '' or by
        fields[n + 5], fields[n + 6] = 'reason:' .. id, standing == 'live' and '' or reason
        certificate_event(events, now, standing == 'live' and 'reinstated' or standing, id, by, reason)
      end
    end
  end
end
if not found then
  return reply('not_found')
end
if marked == 0 and refused then
  return reply('refused')
end
if marked == 0 then
  return reply('repeated')
end
local n = #fields
fields[n + 1], fields[n + 2] = 'events', cjson.encode(events)
fields[n + 3], fields[n + 4] = 'said', (before .. ' ' .. said):sub(-33 * CERTIFICATE_CALLS_MAX)
redis.call('HSET', KEYS[1], unpack(fields))
return reply('marked', text(marked))
