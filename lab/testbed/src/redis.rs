//! A client that writes to a Redis in a guest, over the network of a [`crate::Lan`], and knows what
//! was acknowledged.
//!
//! Keeps two promises: a write counts as acknowledged only when the server has said so; and whoever
//! asks whether all of them are there asks over a connection of their own, which says nothing of
//! what the writing one may have kept.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};

use crate::netns::{self, enter};

const PORT: u16 = 6379;
/// Each is written again and again, with a number that grows.
const KEYS: usize = 2000;
/// Writes that are sent before the answer to the first is read.
const AT_ONCE: usize = 16;
/// A value is so many bytes.
const VALUE: usize = 1024;
/// For an answer, from a guest that moves under a busy host.
const LIMIT: Duration = Duration::from_secs(60);

/// What is known of one key: the last number that was sent, and the last that was acknowledged.
#[derive(Debug, Default)]
struct Known {
    sent: AtomicU64,
    acknowledged: AtomicU64,
}

/// The client at work.
#[derive(Debug)]
pub struct RedisClient {
    namespace: PathBuf,
    guest: Ipv4Addr,
    known: Arc<Vec<Known>>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

impl RedisClient {
    /// Writes to `guest` from within the network namespace at `namespace`.
    pub(crate) fn start(namespace: &Path, guest: Ipv4Addr) -> Self {
        let namespace = namespace.to_owned();
        let known: Arc<Vec<Known>> = Arc::new((0..KEYS).map(|_| Known::default()).collect());
        let ends = Arc::<AtomicBool>::default();
        let (own, written, ending) = (namespace.clone(), Arc::clone(&known), Arc::clone(&ends));
        let thread =
            std::thread::spawn(move || write(&mut connect(&own, guest)?, &written, &ending));
        Self { namespace, guest, known, ends, thread: Some(thread) }
    }

    /// How many writes were acknowledged so far.
    #[must_use]
    pub fn acknowledged(&self) -> u64 {
        self.known.iter().map(|key| key.acknowledged.load(Ordering::SeqCst)).sum()
    }

    /// Waits for `count` more writes that are acknowledged.
    ///
    /// # Errors
    /// When they do not come.
    pub fn await_acknowledged(&mut self, count: u64) -> anyhow::Result<()> {
        let (until, wanted) = (Instant::now() + LIMIT, self.acknowledged() + count);
        while self.acknowledged() < wanted {
            if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                return self.end().and_then(|()| bail!("the client has ended"));
            }
            ensure!(Instant::now() < until, "Redis acknowledges no more writes");
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Asks for every key, over a new connection; how many were compared.
    ///
    /// # Errors
    /// When one is older than what was acknowledged, is missing, or has another value than any that
    /// was sent.
    pub fn check(&self) -> anyhow::Result<usize> {
        // Namespaces are a thread's own (setns(2)).
        std::thread::scope(|scope| {
            let looking = scope.spawn(|| check(&self.namespace, self.guest, &self.known));
            looking.join().map_err(|_| anyhow!("the client has panicked"))?
        })
    }

    fn end(&mut self) -> anyhow::Result<()> {
        self.ends.store(true, Ordering::SeqCst);
        let Some(thread) = self.thread.take() else { return Ok(()) };
        thread.join().map_err(|_| anyhow!("the client has panicked"))?
    }
}

impl Drop for RedisClient {
    fn drop(&mut self) {
        // Without waiting: the guest may be gone, and the namespace goes with the connection.
        self.ends.store(true, Ordering::SeqCst);
    }
}

fn connect(namespace: &Path, guest: Ipv4Addr) -> anyhow::Result<BufReader<TcpStream>> {
    enter(&File::open(namespace).context("the namespace is gone")?)?;
    let address = SocketAddrV4::new(guest, PORT);
    netns::connect(address, LIMIT, "Redis in the guest does not listen").map(BufReader::new)
}

fn write(
    connection: &mut BufReader<TcpStream>,
    known: &[Known],
    ends: &AtomicBool,
) -> anyhow::Result<()> {
    for first in (0..KEYS).step_by(AT_ONCE).cycle() {
        if ends.load(Ordering::SeqCst) {
            return Ok(());
        }
        let keys = first..(first + AT_ONCE).min(KEYS);
        let mut asked = Vec::new();
        for key in keys.clone() {
            let number = known[key].sent.fetch_add(1, Ordering::SeqCst) + 1;
            asked.extend(command(&[b"SET", name(key).as_bytes(), &value(key, number)]));
        }
        connection.get_mut().write_all(&asked).context("the connection to Redis broke")?;
        for key in keys {
            let said = line(connection)?;
            ensure!(said == "+OK", "Redis said {said}");
            // Answers come in the order of the writes, of which one was sent for this key.
            let sent = known[key].sent.load(Ordering::SeqCst);
            known[key].acknowledged.store(sent, Ordering::SeqCst);
        }
        // Some ten thousand writes a second would be all that the guest does.
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn check(namespace: &Path, guest: Ipv4Addr, known: &[Known]) -> anyhow::Result<usize> {
    let mut connection = connect(namespace, guest)?;
    let mut compared = 0;
    for (key, known) in known.iter().enumerate() {
        let least = known.acknowledged.load(Ordering::SeqCst);
        let asked = command(&[b"GET", name(key).as_bytes()]);
        connection.get_mut().write_all(&asked).context("the connection to Redis broke")?;
        let found = bulk(&mut connection)?;
        let most = known.sent.load(Ordering::SeqCst);
        judge(key, found.as_deref(), least, most)?;
        compared += usize::from(least > 0);
    }
    Ok(compared)
}

/// Whether `found` is what was sent for `key` under one of the numbers `least` to `most`; 0 is no
/// number.
fn judge(key: usize, found: Option<&[u8]>, least: u64, most: u64) -> anyhow::Result<()> {
    let Some(found) = found else {
        ensure!(least == 0, "BUG redis: {} is gone, write {least} was acknowledged", name(key));
        return Ok(());
    };
    let number = found.split(|byte| *byte == b' ').nth(1);
    let number = number.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
    let number: u64 = number.unwrap_or_default();
    ensure!(found == value(key, number), "BUG redis: {} has a value nobody wrote", name(key));
    ensure!(
        (least..=most).contains(&number),
        "BUG redis: {} is of write {number}; {least} was acknowledged, {most} was sent",
        name(key)
    );
    Ok(())
}

fn name(key: usize) -> String {
    format!("key{key}")
}

/// The key, the number, and what follows from both.
fn value(key: usize, number: u64) -> Vec<u8> {
    let mut bytes = format!("{key} {number} ").into_bytes();
    let mut rng = (key as u64) << 32 ^ number;
    while bytes.len() < VALUE {
        rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        bytes.extend((rng >> 33).to_le_bytes());
    }
    bytes
}

/// An array of strings, as Redis is told things (RESP).
fn command(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend(format!("${}\r\n", word.len()).bytes());
        bytes.extend(*word);
        bytes.extend(b"\r\n");
    }
    bytes
}

fn line(connection: &mut BufReader<TcpStream>) -> anyhow::Result<String> {
    let mut line = String::new();
    let count = connection.read_line(&mut line).context("the connection to Redis broke")?;
    ensure!(count > 0, "Redis has closed the connection");
    Ok(line.trim_end().to_owned())
}

/// A string that Redis answers with; `None` where there is none.
fn bulk(connection: &mut BufReader<TcpStream>) -> anyhow::Result<Option<Vec<u8>>> {
    let head = line(connection)?;
    let length = head.strip_prefix('$').with_context(|| format!("Redis said {head}"))?;
    let Ok(length) = length.parse::<usize>() else { return Ok(None) };
    ensure!(length <= VALUE * 2, "Redis has {length} bytes where {VALUE} were written");
    let mut bytes = vec![0; length + 2];
    connection.read_exact(&mut bytes).context("the connection to Redis broke")?;
    bytes.truncate(length);
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_an_old_and_a_damaged_value_are_told_apart_from_what_was_acknowledged() {
        let told = |found: Option<&[u8]>| judge(7, found, 3, 5).map_err(|told| told.to_string());
        assert!(told(Some(&value(7, 3))).is_ok() && told(Some(&value(7, 5))).is_ok());
        assert!(told(None).unwrap_err().contains("is gone"));
        assert!(told(Some(&value(7, 2))).unwrap_err().contains("of write 2; 3 was acknowledged"));
        let mut damaged = value(7, 4);
        damaged[900] ^= 1;
        assert!(told(Some(&damaged)).unwrap_err().contains("nobody wrote"));
        assert!(told(Some(&value(8, 4))).unwrap_err().contains("nobody wrote"));
        // Nothing was acknowledged yet.
        assert!(judge(7, None, 0, 1).is_ok());
    }

    #[test]
    fn redis_is_told_an_array_of_strings() {
        assert_eq!(command(&[b"GET", b"key1"]), b"*2\r\n$3\r\nGET\r\n$4\r\nkey1\r\n");
    }
}
