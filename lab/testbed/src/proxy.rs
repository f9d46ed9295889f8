//! A link that does harm on command: a relay of TCP in a process of the test.
//!
//! Keeps three promises. Without a command every byte passes as it came, in order. A watch holds
//! the link before the very byte that it names, both ways of all connections with it, until it is
//! released; so what happens meanwhile happens at that moment, however busy the machine is. And a
//! relay that is dropped leaves no connection. What the bytes mean is for the watch to say.

use std::fmt;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;

/// As much is read at once.
const CHUNK: usize = 1 << 16;
/// Between pieces of a few bytes, so that each of them is read alone.
const PIECE_PAUSE: Duration = Duration::from_micros(50);

/// Which way bytes pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// From who connects to who listens.
    There,
    /// Back.
    Back,
}

/// What is done to the bytes at which the link was held, when it is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    /// Nothing: they pass.
    None,
    /// So many of them are left out.
    Lose(usize),
    /// The first so many of them pass in another order: their second half first.
    Reorder(usize),
    /// One bit of them is flipped, counted from the first.
    Flip(usize),
    /// The first so many pass in pieces of one to seven bytes.
    Pieces(usize),
}

/// Looks at what is about to pass on a connection, by its number: where in it the link is to be
/// held, if it is.
pub type Watch = Box<dyn FnMut(usize, Way, &[u8]) -> Option<usize> + Send>;

/// A relay to a destination. Dropping it cuts it.
#[derive(Debug)]
pub struct Proxy {
    address: String,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    destination: String,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The two ends of each connection: who connected, who listens.
    ends: Vec<[TcpStream; 2]>,
    watch: Option<Watch>,
    is_held: bool,
    /// What was to pass up to the held byte has passed.
    is_reached: bool,
    harm: Option<Harm>,
    is_cut: bool,
    is_half_open: bool,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("State");
        shown.field("connections", &self.ends.len()).field("is_held", &self.is_held);
        shown.field("is_cut", &self.is_cut).finish_non_exhaustive()
    }
}

impl Proxy {
    /// Relays to `destination` from a new address of this host.
    ///
    /// # Errors
    /// When no address can be had.
    pub fn to(destination: &str) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("cannot listen")?;
        let address = listener.local_addr()?.to_string();
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { destination: destination.to_owned(), state, changed });
        let relay = Arc::downgrade(&shared);
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Some(shared) = relay.upgrade() else { return };
                shared.connect(near);
            }
        });
        Ok(Self { address, shared })
    }

    /// Where to connect to.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Has the link held where `watch` says, once.
    pub fn hold_where(&self, watch: Watch) {
        let mut state = self.shared.lock();
        state.is_reached = false;
        state.watch = Some(watch);
    }

    /// Waits until it is held, or `given_up` says that it will never be; whether it is.
    pub fn await_hold(&self, limit: Duration, mut given_up: impl FnMut() -> bool) -> bool {
        let until = Instant::now() + limit;
        let mut state = self.shared.lock();
        while !state.is_reached {
            if Instant::now() > until || given_up() {
                // From here on nothing is held any more.
                state.watch = None;
                return state.is_held;
            }
            let waited = self.shared.changed.wait_timeout(state, Duration::from_millis(2));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Holds everything at once, wherever it is.
    pub fn hold(&self) {
        self.shared.lock().is_held = true;
    }

    /// Lets everything pass again, and does `harm` to the bytes at which a watch has held it.
    pub fn release(&self, harm: Harm) {
        let mut state = self.shared.lock();
        (state.is_held, state.harm) = (false, Some(harm));
        self.shared.changed.notify_all();
    }

    /// Breaks all connections, and whatever is tried anew. What was held is lost.
    pub fn cut(&self) {
        let mut state = self.shared.lock();
        state.is_cut = true;
        for end in state.ends.drain(..).flatten() {
            let _ = end.shutdown(Shutdown::Both);
        }
        self.shared.changed.notify_all();
    }

    /// Takes connections again, which pass unharmed.
    pub fn mend(&self) {
        let mut state = self.shared.lock();
        (state.is_cut, state.is_half_open, state.is_held) = (false, false, false);
        self.shared.changed.notify_all();
    }

    /// Closes all connections to the end that `way` leads to. The other end is not told: what it
    /// says is taken, and nothing is answered. Whatever is tried anew breaks.
    pub fn half_open(&self, way: Way) {
        let mut state = self.shared.lock();
        (state.is_half_open, state.is_held) = (true, false);
        state.watch = None;
        for [near, far] in &state.ends {
            let end = if way == Way::There { far } else { near };
            let _ = end.shutdown(Shutdown::Both);
        }
        self.shared.changed.notify_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
        // The listener waits for one more, and then finds nobody to relay for.
        let (shared, _) = (&self.shared, TcpStream::connect(&self.address));
        shared.lock().watch = None;
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connect(self: &Arc<Self>, near: TcpStream) {
        let broken = |state: &State| state.is_cut || state.is_half_open;
        if broken(&self.lock()) {
            return;
        }
        let Ok(far) = TcpStream::connect(&self.destination) else { return };
        let _ = (near.set_nodelay(true), far.set_nodelay(true));
        let clones = (near.try_clone(), far.try_clone(), near.try_clone(), far.try_clone());
        let (Ok(n1), Ok(f1), Ok(n2), Ok(f2)) = clones else { return };
        let mut state = self.lock();
        if broken(&state) {
            return;
        }
        let number = state.ends.len();
        state.ends.push([near, far]);
        drop(state);
        for (way, from, to) in [(Way::There, n1, f1), (Way::Back, f2, n2)] {
            let shared = Arc::clone(self);
            std::thread::spawn(move || shared.relay(number, way, from, to));
        }
    }

    fn relay(&self, number: usize, way: Way, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = vec![0; CHUNK];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let passed = self.pass(number, way, &mut buffer[..count], &mut to);
            // Half open, it is taken and goes nowhere.
            if passed.is_none() && !self.lock().is_half_open {
                break;
            }
        }
        if !self.lock().is_half_open {
            let _ = to.shutdown(Shutdown::Write);
        }
    }

    /// Waits while the link is held; `None` when it is cut meanwhile.
    fn free<'a>(&'a self, mut state: MutexGuard<'a, State>) -> Option<MutexGuard<'a, State>> {
        while state.is_held && !state.is_cut {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        (!state.is_cut).then_some(state)
    }

    fn pass(&self, number: usize, way: Way, bytes: &mut [u8], to: &mut TcpStream) -> Option<()> {
        let mut state = self.free(self.lock())?;
        let held_at = state.watch.as_mut().and_then(|watch| watch(number, way, bytes));
        let Some(at) = held_at else {
            drop(state);
            return to.write_all(bytes).ok();
        };
        (state.watch, state.is_held) = (None, true);
        drop(state);
        to.write_all(&bytes[..at]).ok()?;
        let mut state = self.lock();
        state.is_reached = true;
        self.changed.notify_all();
        let mut state = self.free(state)?;
        let harm = state.harm.take().unwrap_or(Harm::None);
        drop(state);
        harm.pass(&mut bytes[at..], to)
    }
}

impl Harm {
    fn pass(self, bytes: &mut [u8], to: &mut TcpStream) -> Option<()> {
        let up_to = |count: usize| count.min(bytes.len());
        let mut rest = 0;
        match self {
            Self::None => {}
            Self::Lose(count) => rest = up_to(count),
            Self::Reorder(count) => {
                let count = up_to(count);
                bytes[..count].rotate_left(count / 2);
            }
            Self::Flip(bit) => {
                let at = bit / 8 % bytes.len().max(1);
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << (bit % 8);
                }
            }
            Self::Pieces(count) => {
                rest = up_to(count);
                let (mut at, mut length) = (0, 1);
                while at < rest {
                    let end = (at + length).min(rest);
                    to.write_all(&bytes[at..end]).ok()?;
                    std::thread::sleep(PIECE_PAUSE);
                    (at, length) = (end, length % 7 + 1);
                }
            }
        }
        to.write_all(&bytes[rest..]).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    /// Who connects, and who listens, on a link that is held where a 7 passes on its way there.
    fn held() -> (Proxy, TcpStream, TcpStream, TcpListener) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy::to(&listener.local_addr().unwrap().to_string()).unwrap();
        proxy.hold_where(Box::new(|number, way, bytes| {
            assert_eq!(number, 0);
            bytes.iter().position(|byte| *byte == 7).filter(|_| way == Way::There)
        }));
        let mut near = TcpStream::connect(proxy.address()).unwrap();
        let far = listener.accept().unwrap().0;
        far.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        near.write_all(&[1, 2, 3, 7, 8, 9, 10]).unwrap();
        assert!(proxy.await_hold(LIMIT, || false));
        (proxy, near, far, listener)
    }

    /// Exactly so many bytes, and none behind them for a while.
    fn read(from: &mut TcpStream, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        from.set_read_timeout(Some(LIMIT)).unwrap();
        from.read_exact(&mut bytes).unwrap();
        from.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let more = from.read(&mut [0]);
        assert!(more.is_err(), "{more:?} behind {bytes:?}");
        bytes
    }

    #[test]
    fn a_link_is_held_before_the_very_byte_and_then_all_of_it_passes() {
        let (proxy, mut near, mut far, _listener) = held();
        assert_eq!(read(&mut far, 3), [1, 2, 3]);
        // The other way is held as well.
        far.write_all(&[5]).unwrap();
        near.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        assert!(near.read(&mut [0]).is_err());
        proxy.release(Harm::None);
        assert_eq!(read(&mut far, 4), [7, 8, 9, 10]);
        assert_eq!(read(&mut near, 1), [5]);
        // It is held once.
        near.write_all(&[7]).unwrap();
        assert_eq!(read(&mut far, 1), [7]);
    }

    #[test]
    fn harm_is_done_to_the_bytes_behind_that_alone() {
        let harms: [(Harm, &[u8]); 4] = [
            (Harm::Lose(2), &[9, 10]),
            (Harm::Reorder(4), &[9, 10, 7, 8]),
            (Harm::Flip(8), &[7, 9, 9, 10]),
            (Harm::Pieces(3), &[7, 8, 9, 10]),
        ];
        for (harm, expected) in harms {
            let (proxy, mut near, mut far, _listener) = held();
            assert_eq!(read(&mut far, 3), [1, 2, 3]);
            proxy.release(harm);
            assert_eq!(read(&mut far, expected.len()), expected, "{harm:?}");
            near.write_all(&[11, 12]).unwrap();
            assert_eq!(read(&mut far, 2), [11, 12], "{harm:?}");
        }
    }

    #[test]
    fn a_cut_ends_both_and_what_is_mended_passes_again() {
        let (proxy, mut near, mut far, listener) = held();
        proxy.cut();
        assert_eq!(read_to_end(&mut far), [1, 2, 3]);
        assert_eq!(read_to_end(&mut near), [0; 0]);
        assert_eq!(read_to_end(&mut TcpStream::connect(proxy.address()).unwrap()), [0; 0]);
        proxy.mend();
        let mut near = TcpStream::connect(proxy.address()).unwrap();
        near.write_all(&[7]).unwrap();
        assert_eq!(read(&mut listener.accept().unwrap().0, 1), [7]);
    }

    fn read_to_end(from: &mut TcpStream) -> Vec<u8> {
        let mut bytes = Vec::new();
        from.set_read_timeout(Some(LIMIT)).unwrap();
        let _ = from.read_to_end(&mut bytes);
        bytes
    }

    #[test]
    fn of_a_link_that_is_half_open_one_end_hears_nothing() {
        let (proxy, mut near, mut far, _listener) = held();
        proxy.half_open(Way::There);
        assert_eq!(read_to_end(&mut far), [1, 2, 3]);
        for _ in 0..100 {
            near.write_all(&[0; 4096]).unwrap();
        }
        near.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let waits = near.read(&mut [0]).unwrap_err();
        assert_eq!(waits.kind(), std::io::ErrorKind::WouldBlock);
    }
}
