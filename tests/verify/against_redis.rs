//! The in-memory Redis answers as a real one, byte by byte: the same calls at the same times, in both.

use redis::Connection;

use crate::calls::arguments;
use crate::host::{Host, Stored};
use crate::model::Model;
use crate::sequences::{Scene, Step};
use crate::support::TICK_MS;
use crate::support::server::Server;
use onejob::job::Class;
use onejob::store::Script;

/// How many sequences of random calls.
const WALKS: u64 = 60;
/// How many calls each has.
const CALLS: usize = 24;
/// Which sequences.
const SEED: u64 = 0x6f6e_656a_6f62;

/// A script that takes the time, in whole seconds, as its last argument: a server's own clock cannot be set.
fn timed(script: Script) -> String {
    script.code().replace("redis.call('TIME')", "({ ARGV[#ARGV], '0' })")
}

fn next(random: &mut u64, below: usize) -> usize {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    usize::try_from(*random % below as u64).expect("it is below")
}

fn walk(scene: Scene, random: &mut u64, host: &Host, redis: &mut Connection, job: &str) -> usize {
    let (mut model, mut stored, mut compared) = (Model::new(), Stored::default(), 0);
    for _ in 0..CALLS {
        let mut steps = scene.steps(&model);
        match steps.swap_remove(next(random, steps.len())) {
            Step::Tick => {
                model.age(TICK_MS);
                stored.expire(model.now_ms);
                if stored.packed.is_none() {
                    redis::cmd("DEL").arg(job).exec(redis).expect("an answer");
                }
            }
            Step::Call(call) => {
                let script = Script::ALL.iter().find(|script| script.name() == call.script()).expect("a script");
                let mut argv = arguments(&call);
                argv.push((model.now_ms / 1000).to_string().into_bytes());
                let ours = host.run(call.script(), &argv, &mut stored, model.now_ms, 0);
                let mut command = redis::cmd("EVAL");
                command.arg(timed(*script)).arg(1).arg(job);
                for argument in &argv {
                    command.arg(&argument[..]);
                }
                let theirs: redis::RedisResult<Vec<Vec<u8>>> = command.query(redis);
                assert_eq!(ours, theirs.map_err(|error| error.to_string()), "{call:?}");
                model.answer(&call);
                let (packed, left): (Option<Vec<u8>>, i64) =
                    redis::pipe().cmd("GET").arg(job).cmd("PTTL").arg(job).query(redis).expect("an answer");
                assert_eq!(packed.as_deref(), stored.packed.as_deref(), "{call:?}");
                assert_eq!(left > 0, stored.expires_ms.is_some(), "{call:?}");
                compared += 1;
            }
        }
    }
    compared
}

#[test]
fn the_in_memory_redis_answers_as_a_real_one() {
    let server = Server::start(&[]);
    let client = redis::Client::open(server.socket()).expect("a URL");
    let mut redis = client.get_connection().expect("a connection");
    let host = Host::new(Script::ALL.iter().map(|script| (script.name(), timed(*script))));
    let mut random = SEED;
    let mut compared = 0;
    for walked in 0..WALKS {
        let class = if walked % 2 == 0 { Class::Exclusive } else { Class::Race };
        let scene = Scene { class, releases_on_failure: walked % 3 == 0, has_deadline: walked % 5 == 0 };
        compared += walk(scene, &mut random, &host, &mut redis, &format!("oj:{{{walked}}}"));
    }
    assert!(compared > 1000, "{compared} calls are too few to say something");
}
