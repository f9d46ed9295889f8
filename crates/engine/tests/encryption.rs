//! Migrations over a network that is not trusted: what goes over it, and who may take part.
#![allow(clippy::unwrap_used)]

mod machine;

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use godwit_codec::Codec;
use godwit_disk::DiskChoice;
use godwit_engine::address::{Address, Listener};
use godwit_engine::compression::Compression;
use godwit_engine::destination::{self, Notice};
use godwit_engine::handle::{MigrationHandle, Own};
use godwit_engine::security::{Security, SecurityWish};
use godwit_engine::source::{Options, migrate};
use godwit_engine::{Cancel, Survivor};
use godwit_policy::Settings;
use godwit_tls::make;

use machine::{Destination, Image, Source, SourceDisk, options};

/// Keys of `west` and `east` by one authority; they go with their value.
struct Hosts(PathBuf);

impl Hosts {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("godwit-encryption-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        make(&dir, &["west", "east"].map(str::to_owned), 30).unwrap();
        Self(dir)
    }

    fn wish(&self, host: &str, peers: &[&str]) -> SecurityWish {
        SecurityWish {
            keys: Some(self.0.join(host)),
            peers: peers.iter().map(|name| (*name).to_owned()).collect(),
            ..SecurityWish::default()
        }
    }

    /// At the source, which is `west`, where `name` is expected.
    fn source(&self, name: &str) -> Security {
        self.wish("west", &[name]).source(&"127.0.0.1:1".parse().unwrap()).unwrap()
    }

    /// At the destination, which is `east`, where `peers` may come.
    fn destination(&self, peers: &[&str]) -> Security {
        self.wish("east", peers).destination(&"127.0.0.1:1".parse().unwrap()).unwrap()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Passes connections on to another address, and keeps what goes over them; those behind the first
/// only when so many have come `together`.
fn tap(to: &Address, together: usize) -> (Address, Arc<Mutex<Vec<u8>>>) {
    let seen = Arc::<Mutex<Vec<u8>>>::default();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (at, to) = (listener.local_addr().unwrap(), to.to_string());
    let kept = Arc::clone(&seen);
    std::thread::spawn(move || {
        let (mut came, mut waiting) = (0, Vec::new());
        for here in listener.incoming().map_while(Result::ok) {
            let there = TcpStream::connect(&to).unwrap();
            waiting.push((here.try_clone().unwrap(), there.try_clone().unwrap()));
            waiting.push((there, here));
            came += 1;
            if came > 1 && came <= together {
                continue;
            }
            for (mut from, mut to) in waiting.drain(..) {
                let kept = Arc::clone(&kept);
                std::thread::spawn(move || {
                    let mut buffer = vec![0; 1 << 16];
                    while let Ok(read @ 1..) = from.read(&mut buffer) {
                        kept.lock().unwrap().extend_from_slice(&buffer[..read]);
                        if to.write_all(&buffer[..read]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    (at.to_string().parse().unwrap(), seen)
}

/// Few rounds, and pages as they are.
fn handle() -> MigrationHandle {
    let settings = Settings { downtime_limit: Duration::from_secs(10), ..Settings::default() };
    let own = Own { compression: Compression::Fixed(Codec::None), ..Own::default() };
    MigrationHandle::new(settings, own, Cancel::default())
}

/// A destination that waits for its source.
struct Waiting {
    to: Address,
    /// Who was refused, and why.
    told: Arc<Mutex<Vec<String>>>,
    cancel: Cancel,
    /// Whether the guest has come.
    thread: std::thread::JoinHandle<bool>,
}

impl Waiting {
    fn start(mut destination: Destination, security: Security) -> Self {
        let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let (to, told) = (listener.address().unwrap(), Arc::<Mutex<Vec<String>>>::default());
        let cancel = Cancel::default();
        let (telling, wish) = (Arc::clone(&told), cancel.clone());
        let thread = std::thread::spawn(move || {
            let options = destination::Options {
                wait: Some(Duration::from_secs(60)),
                security,
                disks: DiskChoice::All,
                confined: true,
                ..destination::Options::default()
            };
            let mut notice = |notice: &Notice| {
                if let Notice::Refused(why) = notice {
                    telling.lock().unwrap().push(why.clone());
                }
            };
            let received =
                destination::receive(&mut destination, &listener, &options, &wish, &mut notice);
            received.is_ok()
        });
        Self { to, told, cancel, thread }
    }
}

/// Moves a guest through a tap; what went over it.
fn tapped(here: Security, there: Security) -> Vec<u8> {
    let disk = Arc::new(SourceDisk::new("disk", 4 << 20));
    let mut source = Source::start(Duration::from_secs(60), vec![disk]);
    let images = vec![Arc::new(Image::new("disk", 4 << 20))];
    let waiting = Waiting::start(Destination { images, ..Destination::of(&source) }, there);
    // Two channels of memory and one of the disk. Encrypted ones have to be answered before pages
    // can go over them, and the next one must not wait for that.
    let (to, seen) = tap(&waiting.to, 3);
    let options = Options { to, security: here, ..options(2, true) };
    let result = migrate(&mut source, &options, &handle(), &mut |_| {});
    assert!(result.is_ok(), "{result:?} {:?}", waiting.told);
    assert!(waiting.thread.join().unwrap() && source.retired);
    seen.lock().unwrap().clone()
}

/// Whether somebody on the way sees pages of the guest, which are of one byte each.
fn shows_pages(seen: &[u8]) -> bool {
    seen.chunk_by(|one, next| one == next).any(|run| run.len() > 4000 && run[0] != 0)
}

#[test]
fn a_guest_with_a_disk_moves_and_nothing_of_it_can_be_read_on_the_way() {
    let hosts = Hosts::new();
    let seen = tapped(hosts.source("east"), hosts.destination(&["west"]));
    assert!(seen.len() > 10 << 20 && !shows_pages(&seen));
    assert!(!seen.windows(6).any(|word| word == b"GODWIT"));
    // So that this would notice it.
    let seen = tapped(Security::Local, Security::Local);
    assert!(shows_pages(&seen) && seen.windows(6).any(|word| word == b"GODWIT"));
}

#[test]
fn who_does_not_belong_is_told_so_on_both_sides_and_the_guest_runs_on() {
    let (hosts, others) = (Hosts::new(), Hosts::new());
    let encrypting = hosts.destination(&["west"]);
    // Who comes to whom; the words at the source, and at the destination; who belongs there.
    let cases = [
        (
            (Security::Local, encrypting.clone()),
            "the destination encrypts, and there are no keys here",
            "does not encrypt: give godwit there its keys",
            Some(hosts.source("east")),
        ),
        (
            (hosts.source("east"), Security::Local),
            "does not encrypt: give godwit there its keys",
            "the source encrypts, and there are no keys here",
            Some(Security::Local),
        ),
        (
            (others.source("east"), encrypting.clone()),
            "is signed by another authority than ours",
            "another authority has signed it than the peer believes",
            Some(hosts.source("east")),
        ),
        (
            (hosts.source("north"), encrypting),
            "is not made out to 'north', but to",
            "it is not made out to the name that the peer expects",
            Some(hosts.source("east")),
        ),
        (
            (hosts.source("east"), hosts.destination(&["south", "north"])),
            "it is not made out to the name that the peer expects",
            "is not made out to 'north', but to",
            None,
        ),
    ];
    for ((here, there), at_source, at_destination, belongs) in cases {
        let mut source = Source::start(Duration::from_secs(60), Vec::new());
        let waiting = Waiting::start(Destination::of(&source), there);
        let to = waiting.to;
        let options = Options { to, security: here, ..options(2, true) };
        let failure = migrate(&mut source, &options, &handle(), &mut |_| {}).unwrap_err();
        let words = failure.cause.to_string();
        assert!(words.contains(at_source) && !words.contains('\n'), "{words}");
        assert_eq!(failure.survivor, Survivor::Source);
        assert!(source.running.load(Ordering::Relaxed) && !source.retired);
        // The destination waits on, for one that belongs.
        let expected = belongs.is_some();
        match belongs {
            Some(security) => {
                let options = Options { security, ..options };
                migrate(&mut source, &options, &handle(), &mut |_| {}).unwrap();
            }
            None => waiting.cancel.cancel(),
        }
        assert_eq!(waiting.thread.join().unwrap(), expected);
        let told = waiting.told.lock().unwrap();
        assert!(told.len() == 1 && told[0].contains(at_destination), "{told:?}");
    }
}

#[test]
fn nothing_leaves_this_host_in_the_clear_unless_it_is_wanted() {
    let abroad: Address = "192.0.2.7:4444".parse().unwrap();
    let (nothing, insecure) =
        (SecurityWish::default(), SecurityWish { insecure: true, ..SecurityWish::default() });
    for address in ["0.0.0.0:1", "[::]:1", "192.0.2.7:4444", "east.example:7", "vsock:any:7"] {
        let address = address.parse().unwrap();
        let words = nothing.destination(&address).unwrap_err().to_string();
        assert!(words.contains("nothing would be encrypted") && words.contains("--insecure"));
        assert!(matches!(insecure.destination(&address), Ok(Security::Insecure)));
        let words = nothing.source(&address).unwrap_err().to_string();
        assert!(words.starts_with(&format!("{address} is beyond this host")), "{words}");
    }
    for address in ["127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/run/x"] {
        assert!(matches!(nothing.destination(&address.parse().unwrap()), Ok(Security::Local)));
    }
    let named = SecurityWish { peers: vec!["east".to_owned()], ..SecurityWish::default() };
    let words = named.source(&abroad).unwrap_err().to_string();
    assert!(words.contains("a name is proven by keys"), "{words}");
    let hosts = Hosts::new();
    let usual =
        |dir: &str| SecurityWish { default_keys: Some(hosts.0.join(dir)), ..nothing.clone() };
    assert!(matches!(usual("west").source(&abroad), Ok(Security::Tls(_))));
    assert!(matches!(usual("west").source(&"127.0.0.1:1".parse().unwrap()), Ok(Security::Local)));
    let words = usual("north").source(&abroad).unwrap_err().to_string();
    assert!(words.contains("there are no keys in"), "{words}");
    let not_wanted = SecurityWish { insecure: true, ..usual("north") };
    assert!(matches!(not_wanted.source(&abroad), Ok(Security::Insecure)));
    let both = SecurityWish { insecure: true, ..hosts.wish("west", &[]) };
    assert!(both.source(&abroad).is_err());
    let twice = hosts.wish("west", &["east", "south"]).source(&abroad).unwrap_err().to_string();
    assert!(twice.contains("one destination"), "{twice}");
    let unnamed = hosts.wish("west", &[]).source(&"unix:/run/x".parse().unwrap());
    assert!(unnamed.unwrap_err().to_string().contains("--peer NAME"));
    assert!(matches!(hosts.wish("west", &[]).source(&abroad), Ok(Security::Tls(_))));
}

#[test]
fn a_destination_that_was_bound_elsewhere_listens_in_the_clear_only_if_it_is_told_to() {
    let listener = Listener::bind(&"0.0.0.0:0".parse().unwrap()).unwrap();
    let source = Source::start(Duration::ZERO, Vec::new());
    let mut destination = Destination::of(&source);
    let options = destination::Options::default();
    let cancel = Cancel::default();
    let failure = destination::receive(&mut destination, &listener, &options, &cancel, &mut |_| {});
    let words = failure.unwrap_err().to_string();
    assert!(words.contains("nothing would be encrypted"), "{words}");
}
