-- wrk's requests: a POST with a key of its own each, or always the same one.
--
-- Arguments after `--`: path, run, keys ("new" or "same"), seconds to wait ("0" for none), body.
local count, head, tail, fixed = 0, '', '', nil

function init(arguments)
  local path, run, keys, wait, body = unpack(arguments)
  local prefer = wait == '0' and '' or 'Prefer: wait=' .. wait .. '\r\n'
  head = 'POST ' .. path .. ' HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n' .. prefer
    .. 'Content-Length: ' .. #body .. '\r\nIdempotency-Key: ' .. run .. '-'
  tail = '\r\n\r\n' .. body
  if keys == 'same' then
    fixed = head .. '0' .. tail
  end
end

function request()
  count = count + 1
  return fixed or head .. count .. tail
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format('{"requests":%d,"us":%d,"p50_us":%d,"p99_us":%d,"refused":%d,"broken":%d}\n', summary.requests,
    summary.duration, latency:percentile(50), latency:percentile(99), errors.status,
    errors.connect + errors.read + errors.write + errors.timeout))
end
