//! The link between two network namespaces that carries packets as slowly and as badly as it is
//! told, for kernels without netem.
//!
//! `link-emulator NAMESPACE NAMESPACE WORD...` makes a TUN device in each of the two, says `ready`,
//! and carries what is sent at the one to the other under the conditions that the words tell
//! (`Conditions` of the testbed). It ends when its standard input does, and with it the devices.
//!
//! It sleeps until there is something to do. TCP hands it large packets, as it does a network card
//! that segments, so it is woken for every few tens of packets; what they stand for is counted,
//! delayed and lost packet by packet ([`packet`]).
//!
//! ```text
//!   tun      the ends
//!   packet   large packets and the packets that they stand for
//!   line     when a packet arrives, if it does
//! ```

mod line;
mod packet;
mod tun;

use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::num::NonZero;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use godwit_testbed::Conditions;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use line::{Fate, Line};
use packet::Packet;

/// The longest packet there is, with virtio's header.
const LONGEST: usize = packet::HEADER + (64 << 10);
/// At most so many are taken from one end before the other has its turn.
const BATCH: usize = 64;
/// What is due so soon is delivered with what is due now.
const SOON: Duration = Duration::from_micros(50);
/// A large packet travels in pieces that take no longer to send, as its first packets arrive before
/// its last.
const PIECE: Duration = Duration::from_micros(500);

/// One direction.
struct Way {
    line: Line,
    piece: usize,
    travelling: VecDeque<(Instant, Packet)>,
}

impl Way {
    fn new(conditions: Conditions, number: u64) -> Self {
        let line = Line::new(conditions, number);
        let packet = line.time_for(1500).as_secs_f64();
        let piece = (PIECE.as_secs_f64() / packet.max(1e-9)) as usize;
        Self { line, piece: piece.max(1), travelling: VecDeque::new() }
    }

    /// Takes a packet of the near end.
    fn take(&mut self, now: Instant, packet: &Packet) {
        let count = packet.segments();
        let mut next = 0;
        while next < count {
            let end = (next + self.piece).min(count);
            self.take_piece(now, packet, next, end);
            next = end;
        }
    }

    /// Takes the packets `from..to` of a large one; those that arrive one behind the other do so as
    /// one.
    fn take_piece(&mut self, now: Instant, packet: &Packet, from: usize, to: usize) {
        let (mut first, mut arrival) = (from, None);
        for number in from..to {
            let bytes = packet.part_len(number);
            match self.line.take(now, bytes) {
                Fate::Arrives(at) => arrival = Some(at),
                Fate::Lost | Fate::Dropped => {
                    if let Some(at) = arrival.take() {
                        self.travelling.push_back((at, packet.part(first..number)));
                    }
                    first = number + 1;
                }
            }
        }
        if let Some(at) = arrival {
            self.travelling.push_back((at, packet.part(first..to)));
        }
    }

    fn due(&self) -> Option<Instant> {
        self.travelling.front().map(|(at, _)| *at)
    }

    /// Delivers to the far end what has arrived.
    fn deliver(&mut self, now: Instant, far: &mut File) {
        while self.due().is_some_and(|at| at <= now + SOON) {
            let Some((_, packet)) = self.travelling.pop_front() else { return };
            // A device that is down, or full, loses what it is given.
            let _ = far.write(packet.bytes());
        }
    }
}

fn carry(near: &Path, far: &Path, conditions: Conditions) -> anyhow::Result<()> {
    let mut ends = [tun::create(near)?, tun::create(far)?];
    println!("ready");
    // Both are refused without privilege, and only make the times more even.
    let _ = rustix::process::setpriority_process(None, -20);
    let _ = rustix::thread::set_current_timer_slack(NonZero::new(1));
    let mut ways = [Way::new(conditions, 0), Way::new(conditions, 1)];
    let (mut buffer, input) = (vec![0; LONGEST], std::io::stdin());
    loop {
        let due = ways.iter().filter_map(Way::due).min();
        let wait = due.map(|due| due.saturating_duration_since(Instant::now()));
        let wait = wait.map(Timespec::try_from).transpose()?;
        let (ready, over) = {
            let mut waits = [
                PollFd::new(&ends[0], PollFlags::IN),
                PollFd::new(&ends[1], PollFlags::IN),
                PollFd::new(&input, PollFlags::IN),
            ];
            match poll(&mut waits, wait.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot wait"),
            }
            let [near, far, input] = waits.map(|wait| !wait.revents().is_empty());
            ([near, far], input)
        };
        if over {
            return Ok(());
        }
        for (end, way) in ways.iter_mut().enumerate() {
            for _ in 0..if ready[end] { BATCH } else { 0 } {
                match ends[end].read(&mut buffer) {
                    Ok(len) => way.take(Instant::now(), &Packet::read(&buffer[..len])),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error).context("cannot read from a TUN device"),
                }
                way.deliver(Instant::now(), &mut ends[1 - end]);
            }
        }
        let now = Instant::now();
        for (end, way) in ways.iter_mut().enumerate() {
            way.deliver(now, &mut ends[1 - end]);
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let carried = match arguments.as_slice() {
        [near, far, words @ ..] => words
            .join(" ")
            .parse()
            .and_then(|conditions| carry(Path::new(near), Path::new(far), conditions)),
        _ => (|| bail!("usage: link-emulator NAMESPACE NAMESPACE [rate=1Gbit] [delay=5ms] ..."))(),
    };
    match carried {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("link-emulator: {error:#}");
            ExitCode::FAILURE
        }
    }
}
