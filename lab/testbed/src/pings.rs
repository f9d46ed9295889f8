//! A client of a guest: it asks every few milliseconds, and notes when it hears an answer.
//!
//! Keeps one promise: a silence is told from answer to answer, so what was lost makes it longer and
//! what comes late ends it. That the client itself was held up shows in when it asked.

use std::collections::HashSet;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, ipproto, recv, sendto, socket};

use crate::netns::enter;

/// Between two questions.
const INTERVAL: Duration = Duration::from_millis(5);
/// For an answer to the last question.
const LATE: Duration = Duration::from_secs(1);
/// Questions have a number of 16 bits.
const NUMBERS: usize = 1 << 16;
// ICMP (RFC 792).
const ECHO: u8 = 8;
const ECHO_REPLY: u8 = 0;

/// The client at work.
#[derive(Debug)]
pub struct Pings {
    ends: Arc<AtomicBool>,
    answers: Arc<AtomicUsize>,
    thread: JoinHandle<anyhow::Result<Heard>>,
}

/// What a client heard.
#[derive(Clone, Debug, Default)]
pub struct Heard {
    /// When it asked.
    pub asked: Vec<Instant>,
    /// When it was answered.
    pub answered: Vec<Instant>,
    /// Which questions were, by their places in `asked`.
    pub heard_of: HashSet<usize>,
    /// When it had asked what was answered again, since the question had reached the guest twice.
    pub repeated: Vec<Instant>,
}

/// A time in which nothing was heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silence {
    /// The last answer before it.
    pub from: Instant,
    /// The first answer behind it.
    pub to: Instant,
}

impl Silence {
    /// How long it was.
    #[must_use]
    pub fn length(&self) -> Duration {
        self.to.saturating_duration_since(self.from)
    }
}

impl Heard {
    /// The longest silence that ends behind `from` and begins before `to`.
    #[must_use]
    pub fn longest_silence(&self, from: Instant, to: Instant) -> Option<Silence> {
        let silences = self.answered.windows(2).map(|pair| Silence { from: pair[0], to: pair[1] });
        silences
            .filter(|silence| silence.to > from && silence.from < to)
            .max_by_key(Silence::length)
    }

    /// How many questions behind `from` were never answered.
    #[must_use]
    pub fn lost(&self, from: Instant) -> usize {
        let asked = self.asked.iter().enumerate().filter(|(_, asked)| **asked >= from);
        asked.filter(|(number, _)| !self.heard_of.contains(number)).count()
    }

    /// The longest time behind `from` in which it did not ask.
    #[must_use]
    pub fn longest_rest(&self, from: Instant) -> Duration {
        let pairs = self.asked.windows(2).filter(|pair| pair[1] > from);
        pairs.map(|pair| pair[1] - pair[0]).max().unwrap_or(Duration::MAX)
    }
}

impl Pings {
    /// Asks `guest` from within the network namespace at `namespace`.
    pub(crate) fn start(namespace: &Path, guest: Ipv4Addr) -> anyhow::Result<Self> {
        let namespace = File::open(namespace).context("the namespace is gone")?;
        let ends = Arc::<AtomicBool>::default();
        let answers = Arc::<AtomicUsize>::default();
        let (ending, counter) = (Arc::clone(&ends), Arc::clone(&answers));
        let thread = std::thread::spawn(move || {
            enter(&namespace)?;
            let socket = socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::ICMP))
                .context("cannot ping, which needs root")?;
            ask_and_hear(&socket, guest, &ending, &counter)
        });
        Ok(Self { ends, answers, thread })
    }

    /// Waits for `count` more answers.
    ///
    /// # Errors
    /// When they do not come within `limit`.
    pub fn await_answers(&self, count: usize, limit: Duration) -> anyhow::Result<()> {
        let until = Instant::now() + limit;
        let wanted = self.answers.load(Ordering::Relaxed) + count;
        while self.answers.load(Ordering::Relaxed) < wanted {
            ensure!(!self.thread.is_finished(), "the client has ended early");
            ensure!(
                Instant::now() < until,
                "a guest that is pinged does not answer: is `make guest` up to date?"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Ends it, and tells what it heard.
    ///
    /// # Errors
    /// What kept it from its work.
    pub fn finish(self) -> anyhow::Result<Heard> {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the client has panicked"))?
    }
}

fn ask_and_hear(
    socket: &OwnedFd,
    guest: Ipv4Addr,
    ends: &AtomicBool,
    answers: &AtomicUsize,
) -> anyhow::Result<Heard> {
    let mut heard = Heard::default();
    let mut next = Instant::now();
    let mut packet = [0; 2048];
    let mut until = None;
    // What was asked last is heard of as well, unless it is lost.
    while until
        .is_none_or(|until| Instant::now() < until && heard.heard_of.len() < heard.asked.len())
    {
        let now = Instant::now();
        if ends.load(Ordering::Relaxed) {
            until.get_or_insert(now + LATE);
        }
        if now >= next && until.is_none() {
            let number = heard.asked.len() as u16;
            heard.asked.push(now);
            // Until the guest's card is up nobody answers for it, and the kernel says so.
            let _ =
                sendto(socket, &echo(number), SendFlags::DONTWAIT, &SocketAddrV4::new(guest, 0));
            next = (next + INTERVAL).max(now);
        }
        let wait = if until.is_none() { next.saturating_duration_since(now) } else { INTERVAL };
        let wait = Timespec::try_from(wait)?;
        poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&wait)).context("cannot wait")?;
        while let Ok((_, length)) = recv(socket, &mut packet[..], RecvFlags::DONTWAIT) {
            // With its IP header, whose length stands in its first byte (raw(7)).
            let header = usize::from(packet[0] & 15) * 4;
            let from_guest = packet[12..16] == guest.octets();
            let Some(answer) = packet[..length].get(header..header + 8) else { continue };
            if !from_guest || answer[0] != ECHO_REPLY {
                continue;
            }
            // Numbers come again after five minutes.
            let number = u16::from_be_bytes([answer[6], answer[7]]);
            let turn = heard.asked.len().saturating_sub(1 + usize::from(number));
            let question = turn / NUMBERS * NUMBERS + usize::from(number);
            if heard.heard_of.insert(question) {
                heard.answered.push(Instant::now());
                answers.fetch_add(1, Ordering::Relaxed);
            } else {
                heard.repeated.extend(heard.asked.get(question));
            }
        }
    }
    Ok(heard)
}

/// An ICMP echo request.
fn echo(number: u16) -> [u8; 24] {
    let mut packet = [0; 24];
    packet[0] = ECHO;
    packet[6..8].copy_from_slice(&number.to_be_bytes());
    let words =
        packet.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    packet[2..4].copy_from_slice(&(!folded as u16).to_be_bytes());
    packet
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silence_is_from_answer_to_answer() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let heard = Heard {
            asked: [0, 5, 10, 15, 20, 25, 90].map(at).into(),
            answered: [1, 6, 40, 41].map(at).into(),
            heard_of: [0, 1, 4, 5].into(),
            repeated: Vec::new(),
        };
        let silence = heard.longest_silence(at(0), at(100)).unwrap();
        assert_eq!((silence.from, silence.to), (at(6), at(40)));
        assert_eq!(silence.length(), Duration::from_millis(34));
        assert_eq!(heard.longest_silence(at(0), at(3)).unwrap().length(), Duration::from_millis(5));
        assert_eq!(heard.longest_silence(at(50), at(60)), None);
        assert_eq!((heard.lost(at(0)), heard.lost(at(11))), (3, 2));
        assert_eq!(heard.longest_rest(at(11)), Duration::from_millis(65));
    }
}
