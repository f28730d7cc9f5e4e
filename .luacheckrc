-- What the scripts may use. The composer puts `local SCRIPT`, the prelude and the body into one chunk, so a body sees the prelude's
-- locals: their names are taken from the prelude itself, and a name that it does not define is an error in a body.

-- What Redis' own Lua offers, and no more: no require, no print, no files.
stds.redis = {
   read_globals = {
      'ARGV', 'KEYS', 'error', 'ipairs', 'next', 'pairs', 'pcall', 'select', 'tonumber', 'tostring', 'type', 'unpack',
      cjson = { fields = { 'decode', 'encode' } },
      cmsgpack = { fields = { 'pack', 'unpack' } },
      math = { fields = { 'floor', 'max', 'min' } },
      redis = { fields = { 'call', 'pcall', 'sha1hex' } },
      string = { fields = { 'byte', 'char', 'find', 'format', 'gsub', 'match', 'rep', 'sub' } },
      table = { fields = { 'concat', 'insert', 'remove', 'sort' } },
   },
}
std = 'redis'
max_line_length = 135

local writable = { ECHO = true, JUST_ENDED = true }
local shared, settable, used_elsewhere = { 'SCRIPT' }, {}, {}
for _, file in ipairs({ 'lua/prelude.lua', 'lua/dedup_prelude.lua', 'lua/mirror_prelude.lua' }) do
   for line in io.lines(file) do
      local name = line:match('^local function ([%w_]+)') or line:match('^local ([%w_]+) =')
      if name then
         used_elsewhere[#used_elsewhere + 1] = '2[13]1/' .. name
      end
      if name and writable[name] then
         settable[#settable + 1] = name
      elseif name then
         shared[#shared + 1] = name
      end
   end
end

files['lua/*_*.lua'] = { read_globals = shared, globals = settable }
files['lua/prelude.lua'] = { read_globals = { 'SCRIPT' }, ignore = used_elsewhere }
-- What is for clicks stands behind it: it sees what stands before, and is no script of its own.
local apart = { '431' }
for _, pattern in ipairs(used_elsewhere) do
   apart[#apart + 1] = pattern
end
for _, file in ipairs({ 'lua/dedup_prelude.lua', 'lua/mirror_prelude.lua' }) do
   files[file] = { read_globals = shared, globals = settable, ignore = apart }
end
