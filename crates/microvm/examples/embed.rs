//! How a VMM embeds the engine, with the microvm in the VMM's place: `docs/microvm.md` shows these
//! lines, and a test sees to it that it does. Run with an address to listen at, it takes a guest
//! into a new machine; with another machine's guest it would be the same call at the other side.

use std::error::Error;
use std::time::Duration;

use godwit_engine::address::Listener;
use godwit_engine::report::Measures;
use godwit_engine::steering::{Own, Steering};
use godwit_engine::{Cancel, destination, source};
use godwit_microvm::{Machine, MachinePlan, MicrovmDestination, MicrovmSource, TrackerKind, plain_layout};
use godwit_policy::Settings;
use godwit_units::ByteCount;

/// Moves the guest of `machine` to where `to` listens.
fn migrate_away(machine: &Machine, to: &str) -> Result<Measures, Box<dyn Error>> {
    let mut vm = MicrovmSource::new(machine);
    let options = source::Options {
        to: to.parse()?,
        verify: false,
        channels: 2,
        ledger: true,
        keep_source: false,
        fault: None,
    };
    let steering = Steering::new(Settings::default(), Own::default(), Cancel::default());
    let progress = &mut |progress: &_| eprintln!("{progress:?}");
    Ok(source::migrate(&mut vm, &options, &steering, progress).map_err(|failure| failure.to_string())?)
}

/// Takes a guest into `machine`.
fn take_in(machine: &Machine, at: &str) -> Result<destination::Received, Box<dyn Error>> {
    let listener = Listener::bind(&at.parse()?)?;
    let mut vm = MicrovmDestination::new(machine);
    let options =
        destination::Options { wait: Some(Duration::from_secs(3600)), ..destination::Options::default() };
    let notice = &mut |notice: &_| eprintln!("{notice:?}");
    let received = destination::receive(&mut vm, &listener, &options, &Cancel::default(), notice);
    Ok(received.map_err(|failure| failure.to_string())?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (events, _ended) = std::sync::mpsc::channel();
    let plan = MachinePlan {
        blocks: plain_layout(ByteCount(64 << 20), None),
        slots: 1,
        cpus: 1,
        disk: None,
        balloon: None,
        tracker: TrackerKind::KvmLog,
    };
    let machine = Machine::new(&plan, None, Box::new(std::io::sink()), &events)?;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["listen", at] => take_in(&machine, at).map(|received| eprintln!("{received:?}")),
        ["migrate", to] => migrate_away(&machine, to).map(|measures| eprintln!("{measures:?}")),
        _ => Err("write listen ADDR or migrate ADDR".into()),
    }
}
