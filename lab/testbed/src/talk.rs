//! A client that talks with a guest over one TCP connection: it sends a message, waits until the
//! guest has said the same, and begins again.
//!
//! Keeps one promise: whatever comes back otherwise, and an end of the connection, is an error. A
//! guest that moves may keep it waiting, and nothing more.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use godwit_stamp::settings::ECHO_PORT;

use crate::netns::{connect, enter};
use crate::pings::Heard;

/// A message fills memory of the guest's card, and not one packet alone.
const MESSAGE: usize = 12 << 10;
/// For the guest to begin to listen, and for an answer.
const LIMIT: Duration = Duration::from_secs(60);

/// The client at work.
#[derive(Debug)]
pub struct Talk {
    ends: Arc<AtomicBool>,
    answers: Arc<AtomicUsize>,
    thread: JoinHandle<anyhow::Result<Heard>>,
}

impl Talk {
    /// Talks with `guest` from within the network namespace at `namespace`.
    pub(crate) fn start(namespace: &Path, guest: Ipv4Addr) -> anyhow::Result<Self> {
        let namespace = File::open(namespace).context("the namespace is gone")?;
        let ends = Arc::<AtomicBool>::default();
        let answers = Arc::<AtomicUsize>::default();
        let (ending, counter) = (Arc::clone(&ends), Arc::clone(&answers));
        let thread = std::thread::spawn(move || {
            enter(&namespace)?;
            let address = SocketAddrV4::new(guest, ECHO_PORT);
            let silent = "the guest does not listen: is `make guest` up to date?";
            let mut connection = connect(address, LIMIT, silent)?;
            talk(&mut connection, &ending, &counter)
        });
        Ok(Self { ends, answers, thread })
    }

    /// Waits for `count` more answers.
    ///
    /// # Errors
    /// When they do not come, or the connection has ended.
    pub fn await_answers(&self, count: usize) -> anyhow::Result<()> {
        let until = Instant::now() + LIMIT;
        let wanted = self.answers.load(Ordering::Relaxed) + count;
        while self.answers.load(Ordering::Relaxed) < wanted {
            ensure!(!self.thread.is_finished(), "the conversation has ended: see its end");
            ensure!(Instant::now() < until, "the guest answers no more");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Ends it, and tells when it was answered.
    ///
    /// # Errors
    /// When the connection broke, or the guest said something else.
    pub fn finish(self) -> anyhow::Result<Heard> {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the client has panicked"))?
    }
}

fn talk(
    connection: &mut TcpStream,
    ends: &AtomicBool,
    answers: &AtomicUsize,
) -> anyhow::Result<Heard> {
    let mut heard = Heard::default();
    let mut answer = vec![0; MESSAGE];
    while !ends.load(Ordering::Relaxed) {
        let number = heard.asked.len() as u64;
        let words = (0..MESSAGE as u64 / 8).map(|word| (number << 16 | word).to_le_bytes());
        let message: Vec<u8> = words.flatten().collect();
        heard.asked.push(Instant::now());
        connection.write_all(&message).context("the connection broke")?;
        connection.read_exact(&mut answer).context("the connection broke")?;
        ensure!(answer == message, "message {number} came back otherwise");
        heard.answered.push(Instant::now());
        answers.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(heard)
}
