//! The shipped scripts in a Lua 5.1 of our own, over an in-memory Redis that holds one job and fails when it is told to.
//!
//! It knows the commands of the scripts of a job, as Redis answers them, and no other; `against_redis.rs` compares it with a real
//! one, byte by byte. Not here: hints, blobs, protection and certificates, whose keys other scripts write.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use mlua::{Function, Lua, LuaString, Table, Value, Variadic};

use crate::msgpack;

/// What Redis keeps of one job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Stored {
    pub packed: Option<Arc<[u8]>>,
    /// When the key is over; `None` for never.
    pub expires_ms: Option<u64>,
}

impl Stored {
    /// Forgets a key whose life is over.
    pub fn expire(&mut self, now_ms: u64) {
        if self.expires_ms.is_some_and(|expires_ms| now_ms >= expires_ms) {
            *self = Stored::default();
        }
    }
}

/// What a script answered: its reply, or the error that it ended with.
pub type Ran = Result<Vec<Vec<u8>>, String>;

#[derive(Default)]
struct Server {
    stored: Stored,
    now_ms: u64,
    read_only: bool,
    /// Commands of the present script so far.
    commands: usize,
    writes: usize,
    /// The command that fails, counted from 1; 0 for none.
    fails: usize,
}

/// One Redis and its scripts.
pub struct Host {
    lua: Lua,
    scripts: BTreeMap<String, (Function, bool)>,
    run: Function,
    server: Rc<RefCell<Server>>,
}

/// How a script's error comes out, as Redis takes it apart.
const RUN: &str = "\
local script = ...
local ok, value = pcall(script)
if ok then return value, '' end
return false, type(value) == 'table' and value.err or tostring(value)
";

impl Host {
    /// Loads scripts, each a name and its text as Redis gets it.
    pub fn new<'a>(scripts: impl IntoIterator<Item = (&'a str, String)>) -> Self {
        let lua = Lua::new();
        let server = Rc::new(RefCell::new(Server::default()));
        open(&lua, &server).expect("a Lua with Redis' libraries");
        let run = lua.load(RUN).into_function().expect("the runner");
        let load = |(name, text): (&str, String)| {
            let (first, body) = text.split_once('\n').expect("a script begins with its #!lua line");
            assert!(first.starts_with("#!lua"), "{name}: {first}");
            let function = lua.load(body).set_name(name).into_function().unwrap_or_else(|error| panic!("{name}: {error}"));
            (name.to_owned(), (function, first.contains("no-writes")))
        };
        let scripts = scripts.into_iter().map(load).collect();
        Host { lua, scripts, run, server }
    }

    /// Runs a script over what is stored, at a moment; `fails` is the command that fails, from 1, or 0.
    pub fn run(&self, script: &str, arguments: &[Vec<u8>], stored: &mut Stored, now_ms: u64, fails: usize) -> Ran {
        let (function, read_only) = &self.scripts[script];
        let before = std::mem::take(stored);
        *self.server.borrow_mut() = Server { stored: before, now_ms, read_only: *read_only, commands: 0, writes: 0, fails };
        let ran = self.call(function, arguments).expect("a Lua that runs");
        *stored = std::mem::take(&mut self.server.borrow_mut().stored);
        ran
    }

    /// How many commands the last script made, and how many of them wrote.
    pub fn commands(&self) -> (usize, usize) {
        let server = self.server.borrow();
        (server.commands, server.writes)
    }

    fn call(&self, function: &Function, arguments: &[Vec<u8>]) -> mlua::Result<Ran> {
        let globals = self.lua.globals();
        let argv = self.lua.create_table_with_capacity(arguments.len(), 0)?;
        for (place, argument) in (1..).zip(arguments) {
            argv.raw_set(place, self.lua.create_string(argument)?)?;
        }
        globals.raw_set("ARGV", argv)?;
        let (value, error): (Value, LuaString) = self.run.call(function)?;
        let Value::Table(reply) = value else { return Ok(Err(error.to_string_lossy())) };
        let strings = (1..).map(|place| reply.raw_get::<Option<LuaString>>(place));
        let strings: Vec<LuaString> = strings.map_while(Result::transpose).collect::<Result<_, _>>()?;
        Ok(Ok(strings.iter().map(|text| text.as_bytes().to_vec()).collect()))
    }
}

fn open(lua: &Lua, server: &Rc<RefCell<Server>>) -> mlua::Result<()> {
    let globals = lua.globals();
    globals.raw_set("KEYS", vec!["oj:{a job}"])?;

    let redis: Table = lua.create_table()?;
    let server = Rc::clone(server);
    let call = lua.create_function(move |lua, words: Variadic<LuaString>| {
        let words: Vec<Vec<u8>> = words.iter().map(|word| word.as_bytes().to_vec()).collect();
        let words: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
        answer(lua, &mut server.borrow_mut(), &words)
    })?;
    redis.raw_set("call", call)?;
    globals.raw_set("redis", redis)?;

    let cmsgpack = lua.create_table()?;
    cmsgpack.raw_set(
        "pack",
        lua.create_function(|lua, value: Value| {
            let mut packed = Vec::new();
            msgpack::pack(&value, &mut packed)?;
            lua.create_string(&packed)
        })?,
    )?;
    let unpack = |lua: &Lua, packed: LuaString| {
        let value = msgpack::unpack(&packed.as_bytes()).map_err(mlua::Error::runtime)?;
        msgpack::to_lua(lua, &value)
    };
    cmsgpack.raw_set("unpack", lua.create_function(unpack)?)?;
    globals.raw_set("cmsgpack", cmsgpack)
}

fn answer(lua: &Lua, server: &mut Server, words: &[&[u8]]) -> mlua::Result<Value> {
    server.commands += 1;
    if server.commands == server.fails {
        return Err(mlua::Error::runtime("ERR this command fails"));
    }
    let bytes = |packed: &Option<Arc<[u8]>>| match packed {
        Some(packed) => Ok(Value::String(lua.create_string(packed)?)),
        None => Ok(Value::Boolean(false)),
    };
    match words {
        [b"TIME"] => {
            let (seconds, micros) = (server.now_ms / 1000, server.now_ms % 1000 * 1000);
            Ok(Value::Table(lua.create_sequence_from([seconds.to_string(), micros.to_string()])?))
        }
        [b"GET", _] => bytes(&server.stored.packed),
        [b"SET", _, value, options @ ..] => {
            if server.read_only {
                return Err(mlua::Error::runtime("ERR Write commands are not allowed from read-only scripts."));
            }
            let before = server.stored.clone();
            let expires_ms = match options {
                [] | [b"NX", b"GET"] => None,
                [b"KEEPTTL"] => before.expires_ms,
                [b"PX", life] => {
                    let life: u64 = std::str::from_utf8(life).ok().and_then(|life| life.parse().ok()).unwrap_or(0);
                    if life == 0 {
                        return Err(mlua::Error::runtime("ERR invalid expire time in 'set' command"));
                    }
                    Some(server.now_ms + life)
                }
                other => panic!("this Redis does not know SET with {other:?}"),
            };
            let is_claim = options == [b"NX".as_slice(), b"GET"];
            if !(is_claim && before.packed.is_some()) {
                server.writes += 1;
                server.stored = Stored { packed: Some(Arc::from(*value)), expires_ms };
            }
            if is_claim { bytes(&before.packed) } else { Ok(Value::String(lua.create_string("OK")?)) }
        }
        other => panic!("this Redis does not know {:?}", other.first().map(|word| String::from_utf8_lossy(word))),
    }
}
