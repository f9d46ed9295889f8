//! A link between a source and a destination that can be cut, wholly or in part, stand still, and
//! be made again.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use godwit_engine::address::Address;
use godwit_wire::{GREETING_LEN, Greeting, SessionId};

/// The link. It ends with the test's process.
#[derive(Clone)]
pub struct Proxy(Arc<State>);

struct State {
    near: Address,
    far: String,
    /// The connections that stand, both ends of each, and whether they carry anything.
    connections: Mutex<Vec<(TcpStream, TcpStream, Arc<AtomicBool>)>>,
    closed_until: Mutex<Option<Instant>>,
    /// Carried to the destination.
    carried: AtomicU64,
    /// It is cut when so much was carried, each time for so long.
    cuts: Mutex<Vec<(u64, Duration)>>,
    /// How often it was cut.
    made: AtomicU64,
    session: Mutex<Option<SessionId>>,
}

impl Proxy {
    /// One to the destination that listens at `far`; it is cut whenever so many bytes were carried
    /// to it, for so long. They come in order.
    pub fn new(far: &Address, cuts: &[(u64, Duration)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let state = Arc::new(State {
            near: listener.local_addr().unwrap().to_string().parse().unwrap(),
            far: far.to_string(),
            connections: Mutex::default(),
            closed_until: Mutex::default(),
            carried: AtomicU64::new(0),
            cuts: Mutex::new(cuts.to_vec()),
            made: AtomicU64::new(0),
            session: Mutex::default(),
        });
        let proxy = Self(Arc::clone(&state));
        let own = proxy.clone();
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                // Who is not let through sees a connection that ends at once.
                if !own.is_closed()
                    && let Ok(far) = TcpStream::connect(&state.far)
                {
                    own.connect(near, far);
                }
            }
        });
        proxy
    }

    /// Where sources connect to.
    pub fn address(&self) -> Address {
        self.0.near.clone()
    }

    /// How often it was cut.
    pub fn cuts_made(&self) -> u64 {
        self.0.made.load(Ordering::SeqCst)
    }

    /// Bytes that were carried to the destination.
    pub fn carried(&self) -> u64 {
        self.0.carried.load(Ordering::SeqCst)
    }

    /// Ends all connections, and lets none through for `time`.
    pub fn cut(&self, time: Duration) {
        *self.0.closed_until.lock().unwrap() = Instant::now().checked_add(time);
        self.0.made.fetch_add(1, Ordering::SeqCst);
        for (near, far, _) in self.0.connections.lock().unwrap().drain(..) {
            end(&near, &far);
        }
    }

    /// Ends for good.
    pub fn cut_for_good(&self) {
        self.cut(Duration::from_secs(3600));
    }

    /// Lets connections through again.
    pub fn mend(&self) {
        *self.0.closed_until.lock().unwrap() = None;
    }

    /// Ends connection `number` of those that stand, counted in the order in which they were made:
    /// the control connection, then channels.
    pub fn cut_one(&self, number: usize) {
        let (near, far, _) = self.0.connections.lock().unwrap().remove(number);
        self.0.made.fetch_add(1, Ordering::SeqCst);
        end(&near, &far);
    }

    /// Ends the source's half of all connections; the destination's goes on standing, and is
    /// silent.
    pub fn abandon(&self) {
        self.freeze();
        self.0.made.fetch_add(1, Ordering::SeqCst);
        for (near, _, _) in &*self.0.connections.lock().unwrap() {
            let _ = near.shutdown(Shutdown::Both);
        }
    }

    /// The session whose connections it carries, as anybody learns it who sees one of them.
    pub fn session(&self) -> Option<SessionId> {
        *self.0.session.lock().unwrap()
    }

    /// What stands now goes on standing, and carries nothing any more; new ones are let through.
    pub fn freeze(&self) {
        for (_, _, frozen) in &*self.0.connections.lock().unwrap() {
            frozen.store(true, Ordering::SeqCst);
        }
    }

    fn is_closed(&self) -> bool {
        self.0.closed_until.lock().unwrap().is_some_and(|until| Instant::now() < until)
    }

    fn connect(&self, near: TcpStream, far: TcpStream) {
        let frozen = Arc::<AtomicBool>::default();
        let clone = |stream: &TcpStream| stream.try_clone().unwrap();
        let (back_from, back_to) = (clone(&far), clone(&near));
        let (proxy, own) = (self.clone(), Arc::clone(&frozen));
        let kept = (clone(&near), clone(&far), Arc::clone(&frozen));
        self.0.connections.lock().unwrap().push(kept);
        let mut first = [0; GREETING_LEN];
        if let Ok(GREETING_LEN) = near.peek(&mut first)
            && let Ok(greeting) = Greeting::decode(&first)
        {
            *self.0.session.lock().unwrap() = Some(greeting.session);
        }
        std::thread::spawn(move || carry(near, far, &own, |count| proxy.count(count)));
        std::thread::spawn(move || carry(back_from, back_to, &frozen, |_| {}));
    }

    fn count(&self, count: u64) {
        let carried = self.0.carried.fetch_add(count, Ordering::SeqCst) + count;
        let due = {
            let mut cuts = self.0.cuts.lock().unwrap();
            if cuts.first().is_some_and(|(at, _)| carried >= *at) {
                Some(cuts.remove(0).1)
            } else {
                None
            }
        };
        if let Some(time) = due {
            self.cut(time);
        }
    }
}

fn end(near: &TcpStream, far: &TcpStream) {
    let _ = near.shutdown(Shutdown::Both);
    let _ = far.shutdown(Shutdown::Both);
}

fn carry(mut from: TcpStream, mut to: TcpStream, frozen: &AtomicBool, count: impl Fn(u64)) {
    let mut buffer = vec![0; 1 << 15];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        while frozen.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(50));
        }
        if to.write_all(&buffer[..read]).is_err() {
            break;
        }
        count(read as u64);
    }
    end(&from, &to);
}
