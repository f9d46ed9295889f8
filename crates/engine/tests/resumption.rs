//! Connections that are lost before the guest is stopped, at many moments and in many ways, and
//! made again: the guest arrives exact, with its disks, and little is sent twice.
#![allow(clippy::unwrap_used)]

mod machine;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use godwit_disk::DiskChoice;
use godwit_engine::address::{Address, Listener};
use godwit_engine::destination::{self, Faults, Notice};
use godwit_engine::handle::{MigrationHandle, Own};
use godwit_engine::report::{Measures, Progress, Stage};
use godwit_engine::source::{self, Fault, migrate};
use godwit_engine::vm::SourceVm;
use godwit_engine::{Cancel, EngineError, Failure, Phase, Survivor};
use godwit_memory::RamBlock;
use godwit_policy::{Settings, ThrottleMode};
use godwit_wire::{GREETING_LEN, Greeting, Message, Role, Version};

use machine::{Destination, Found, Image, Proxy, SIZES, Source, SourceDisk};

const OUTAGE: Duration = Duration::from_millis(300);
/// All of its memory.
const RAM: u64 = (SIZES[0] + SIZES[1]) << 12;
const MIB: u64 = 1 << 20;

/// Both sides and the link between them.
struct Move {
    source: Source,
    images: Vec<Arc<Image>>,
    found: Arc<Mutex<Found>>,
    handle: MigrationHandle,
    options: source::Options,
    faults: Faults,
    keep: Duration,
    cancel: Cancel,
    told: Arc<Mutex<Vec<Notice>>>,
    while_preparing: Box<dyn FnMut() + Send>,
    /// Of the machine at the destination.
    memory: Arc<Vec<RamBlock>>,
    /// Where a destination writes down what another one goes on by.
    kept: Option<PathBuf>,
}

/// A destination, before it is started.
type Receiver = Box<dyn FnOnce() -> (Address, JoinHandle<Result<(), Failure>>)>;

impl Move {
    /// A guest that works for `busy`, over a link that carries so many MiB a second.
    fn new(busy: Duration, rate: u64, disks: Vec<Arc<SourceDisk>>) -> Self {
        let settings = Settings {
            downtime_limit: Duration::from_secs(10),
            patience: None,
            ..Settings::default()
        };
        let rate = format!("{rate}MiB/s").parse().unwrap();
        let compression = "none".parse().unwrap();
        let own = Own { max_bandwidth: Some(rate), compression, ..Own::default() };
        let handle = MigrationHandle::new(settings, own, Cancel::default());
        let to = Address::Tcp(String::new());
        let source = Source::start(busy, disks);
        Self {
            memory: Destination::of(&source).ram,
            kept: None,
            source,
            images: Vec::new(),
            found: Arc::default(),
            handle,
            options: source::Options {
                channels: 2,
                verify: source::Verify::Live,
                ..source::Options::new(to)
            },
            faults: Faults::default(),
            keep: Duration::from_secs(60),
            cancel: Cancel::default(),
            told: Arc::default(),
            while_preparing: Box::new(|| {}),
        }
    }

    /// Starts the destination; where it listens.
    fn receive(&mut self) -> (Address, JoinHandle<Result<(), Failure>>) {
        self.receiver()()
    }

    fn receiver(&mut self) -> Receiver {
        let while_preparing = std::mem::replace(&mut self.while_preparing, Box::new(|| {}));
        let mut destination = Destination {
            ram: Arc::clone(&self.memory),
            images: self.images.clone(),
            found: Arc::clone(&self.found),
            while_preparing,
            ..Destination::of(&self.source)
        };
        let options = destination::Options {
            wait: Some(Duration::from_secs(60)),
            disks: DiskChoice::All,
            faults: self.faults,
            reconnect: self.keep,
            record: self.kept.clone(),
            confined: true,
            ..destination::Options::default()
        };
        let (cancel, told) = (self.cancel.clone(), Arc::clone(&self.told));
        Box::new(move || {
            let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
            let at = listener.address().unwrap();
            let receiving = std::thread::spawn(move || {
                let mut notice = |notice: &Notice| told.lock().unwrap().push(notice.clone());
                destination::receive(&mut destination, &listener, &options, &cancel, &mut notice)
                    .map(drop)
            });
            (at, receiving)
        })
    }

    /// Moves the guest through `proxy`, which leads to a destination; `look` sees the progress.
    fn migrate(
        &mut self,
        proxy: &Proxy,
        look: &mut dyn FnMut(&Progress),
    ) -> Result<Measures, Failure> {
        let options = source::Options { to: proxy.address(), ..self.options.clone() };
        migrate(&mut self.source, &options, &self.handle, look)
    }

    /// All of it, over a link that is cut as `cuts` say: it must arrive. Returns what was measured,
    /// and how often the link was cut.
    fn arrives(&mut self, cuts: &[(u64, Duration)]) -> (Measures, u64) {
        let (to, receiving) = self.receive();
        let proxy = Proxy::new(&to, cuts);
        let result = self.migrate(&proxy, &mut |_| {});
        let received = receiving.join().unwrap();
        assert!(result.is_ok() && received.is_ok(), "{result:?} {received:?}");
        self.check_arrived();
        (result.unwrap(), proxy.cuts_made())
    }

    fn check_arrived(&self) {
        let found = self.found.lock().unwrap();
        // Memory is compared when the first device state comes, and with it the disks.
        assert_eq!(found.pages_first, Some(true), "memory or disks differ");
        assert!(found.ran && self.source.retired);
    }

    fn check_stayed(&self, failure: &Failure) {
        assert_eq!(failure.survivor, Survivor::Source, "{failure}");
        assert!(self.source.running.load(Ordering::Relaxed) && self.source.guest.is_some());
        assert!(!self.found.lock().unwrap().ran && !self.source.retired);
    }

    fn was_told(&self, of: impl Fn(&Notice) -> bool) -> usize {
        self.told.lock().unwrap().iter().filter(|notice| of(notice)).count()
    }
}

const BUSY: Duration = Duration::from_secs(60);

fn is_resumed(notice: &Notice) -> bool {
    matches!(notice, Notice::Resumed { .. })
}

#[test]
fn a_cut_anywhere_in_the_rounds_is_made_good() {
    // The first pages, the middle and the end of the first round, and later rounds.
    for (at, channels) in [(300 << 10, 1), (9 * MIB, 2), (RAM - MIB, 3), (RAM + 9 * MIB, 2)] {
        let mut this = Move::new(BUSY, 60, Vec::new());
        this.options.channels = channels;
        let (measures, cuts) = this.arrives(&[(at, OUTAGE)]);
        assert_eq!((cuts, measures.resumptions), (1, 1), "a cut at {at}");
        assert!(measures.severed >= OUTAGE / 2, "{:?}", measures.severed);
        assert_eq!(measures.round_list.iter().filter(|round| round.cut_off).count(), 1);
        assert_eq!(this.was_told(is_resumed), 1);
    }
}

#[test]
fn memory_that_is_touched_behind_a_cut_is_sent() {
    // Mutation: what was never touched is forgotten with the connections.
    let mut this = Move::new(BUSY, 30, Vec::new());
    this.source = Source::start_late(BUSY, Vec::new(), Duration::from_millis(1500));
    let settings = Settings {
        downtime_limit: Duration::from_millis(1),
        patience: None,
        ..Settings::default()
    };
    let own = Own {
        max_bandwidth: Some("30MiB/s".parse().unwrap()),
        compression: "none".parse().unwrap(),
        ..Own::default()
    };
    this.handle = MigrationHandle::new(settings, own, Cancel::default());
    let forced = this.handle.clone();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(2500));
        let _ = forced.switch_over(true);
    });
    let (measures, cuts) = this.arrives(&[(6 * MIB, OUTAGE)]);
    assert_eq!((cuts, measures.resumptions), (1, 1));
    assert!(this.source.ram()[1].has_data(this.source.ram()[1].all()).unwrap());
}

#[test]
fn many_cuts_are_made_good() {
    for fingerprints in [true, false] {
        let mut this = Move::new(BUSY, 60, Vec::new());
        this.options.fingerprints = fingerprints;
        let cuts: Vec<_> = (1..9).map(|n| (n * 4 * MIB, OUTAGE / 3)).collect();
        let (measures, cuts) = this.arrives(&cuts);
        assert!(cuts >= 5, "{cuts} cuts");
        assert_eq!(u64::from(measures.resumptions), cuts);
    }
}

#[test]
fn a_guest_that_rests_sends_little_again() {
    // Mutation: all of memory, or of what was sent, is sent again.
    let mut this = Move::new(Duration::from_millis(300), 30, Vec::new());
    let (measures, cuts) = this.arrives(&[(9 * MIB, OUTAGE)]);
    assert_eq!((cuts, measures.resumptions), (1, 1));
    // What lies in the buffers of two channels, and the rest of the segments that it is of.
    let sent_again = measures.sent_again.0;
    assert!(sent_again > 0 && sent_again <= 24 * MIB, "{}", measures.sent_again);
    let pages: u64 = measures.round_list.iter().map(|round| round.data.0).sum();
    assert!(pages << 12 <= RAM + sent_again + 6 * MIB, "{pages} pages of data");
}

#[test]
fn what_was_written_before_it_rested_is_not_lost_in_a_later_round() {
    // Mutations: what was sent is not taken back, its fingerprints are kept, or what was harvested
    // in the round that was cut off is not remembered. A guest that goes on writing would hide it.
    for at in [30, 33, 36] {
        let mut this = Move::new(Duration::from_millis(800), 30, Vec::new());
        let (_, cuts) = this.arrives(&[(at * MIB, OUTAGE)]);
        assert_eq!(cuts, 1, "at {at} MiB");
    }
}

#[test]
fn what_went_over_shared_connections_is_taken_back_from_all_of_them() {
    // One that is slow has placed less than the others when the link is cut.
    for (at, busy) in [(9, 800), (33, 800), (45, 60_000)] {
        let mut this = Move::new(Duration::from_millis(busy), 30, Vec::new());
        this.options.channels = 4;
        this.options.fault = Some(Fault::LongWay);
        this.faults.slow_channel = Some((1, Duration::from_millis(60)));
        let (measures, cuts) = this.arrives(&[(at * MIB, OUTAGE)]);
        assert_eq!((cuts, measures.resumptions), (1, 1), "at {at} MiB");
        // More would do where the way is long.
        assert_eq!(measures.channels, 8);
    }
}

#[test]
fn nothing_that_arrived_is_sent_again() {
    // Mutation: what was placed is not told, or not believed. Fingerprints leave out what is known
    // to have arrived; here all of it has, since the link is cut behind the acknowledgement.
    let mut this = Move::new(Duration::from_millis(100), 60, Vec::new());
    let (to, receiving) = this.receive();
    let proxy = Proxy::new(&to, &[]);
    let cut = AtomicBool::new(false);
    let link = proxy.clone();
    let result = this.migrate(&proxy, &mut |progress| {
        // Behind a round that was acknowledged, with nothing written since.
        let clean = progress.round_ended && progress.remaining.0 == 0;
        if clean && !cut.swap(true, Ordering::Relaxed) {
            link.cut(OUTAGE);
        }
    });
    let received = receiving.join().unwrap();
    assert!(result.is_ok() && received.is_ok(), "{result:?} {received:?}");
    this.check_arrived();
    let measures = result.unwrap();
    assert_eq!((measures.resumptions, measures.sent_again.0), (1, 0), "{measures:?}");
}

/// Moves a guest to where a link is cut, and again as a godwit that knows only the record of the
/// first: what that measured, and what arrived of the first.
fn restarted(this: &mut Move, when: impl Fn(&Progress) -> bool) -> Measures {
    let dir = std::env::temp_dir();
    let name = format!("godwit-{}-{:?}", std::process::id(), std::thread::current().id());
    let (record, left) = (dir.join(format!("{name}-1")), dir.join(format!("{name}-2")));
    let (to, receiving) = this.receive();
    let (first, second) = (Proxy::new(&to, &[]), Proxy::new(&to, &[]));
    this.options.reconnect = Duration::from_secs(1);
    this.options.record = Some(record.clone());
    let (link, mut cut) = (first.clone(), false);
    let failure = this
        .migrate(&first, &mut |progress| {
            if when(progress) && !std::mem::replace(&mut cut, true) {
                // What is left when it is killed: the lock is not.
                std::fs::copy(&record, &left).unwrap();
                link.cut_for_good();
            }
        })
        .unwrap_err();
    this.check_stayed(&failure);
    assert!(!record.exists(), "who was not killed leaves nothing");

    // Who has another secret changes nothing.
    let forged = std::fs::read_to_string(&left).unwrap();
    let mut forged: serde_json::Value = serde_json::from_str(&forged).unwrap();
    forged["secret"][0] = (255 - forged["secret"][0].as_u64().unwrap()).into();
    std::fs::copy(&left, &record).unwrap();
    std::fs::write(&record, forged.to_string()).unwrap();
    let failure = this.migrate(&second, &mut |_| {}).unwrap_err();
    this.check_stayed(&failure);
    assert!(failure.to_string().contains("was killed"), "{failure}");

    this.options.record = Some(left.clone());
    let result = this.migrate(&second, &mut |_| {});
    let received = receiving.join().unwrap();
    assert!(result.is_ok() && received.is_ok(), "{result:?} {received:?}");
    assert!(!left.exists());
    this.check_arrived();
    result.unwrap()
}

fn data_bytes(measures: &Measures) -> u64 {
    measures.round_list.iter().map(|round| round.data.0).sum::<u64>() << 12
}

#[test]
fn a_source_that_was_killed_is_followed_by_one_that_sends_only_what_differs() {
    // Mutation: the destination's fingerprints are not taken, so that all is sent again.
    let mut this = Move::new(Duration::from_millis(300), 60, Vec::new());
    let clean = |progress: &Progress| progress.round_ended && progress.remaining.0 == 0;
    let measures = restarted(&mut this, clean);
    assert_eq!(measures.resumptions, 1);
    assert!(data_bytes(&measures) < RAM / 5, "{} of {RAM}", data_bytes(&measures));
}

#[test]
fn a_source_that_was_killed_in_the_middle_is_followed_by_one_that_sends_the_rest() {
    // Mutation: a page is taken for what another one holds, or for unchanged.
    for (busy, channels) in [(Duration::from_millis(600), 3), (BUSY, 1)] {
        let mut this = Move::new(busy, 30, Vec::new());
        this.options.channels = channels;
        restarted(&mut this, |progress| progress.sent.0 > 12 * MIB);
    }
}

#[test]
fn disks_move_along_with_a_guest_whose_source_was_killed() {
    // Mutation: no channel is made for them, or none but what is dirty by now is sent.
    for sent in [2 * MIB, 20 * MIB] {
        let (disks, images) = disks(Duration::from_millis(1));
        let mut this = Move::new(BUSY, 30, disks);
        this.images = images;
        restarted(&mut this, |progress| progress.sent.0 > sent);
        assert!(this.found.lock().unwrap().disks_closed);
    }
}

#[test]
fn of_disks_too_only_what_differs_is_sent_by_a_source_that_follows_another() {
    // Mutation: it is not asked what the destination's disks hold.
    let (disks, images) = disks(Duration::from_millis(30));
    let size: u64 = disks.iter().map(|disk| disk.disk().size.0).sum();
    let mut this = Move::new(Duration::from_millis(1), 60, disks);
    this.images = images;
    let clean = |progress: &Progress| progress.round_ended && progress.remaining.0 == 0;
    let measures = restarted(&mut this, clean);
    let data: u64 = measures.disks.iter().map(|disk| disk.data.bytes().0).sum();
    assert!(data < size / 20, "{data} of {size}");
    assert!(this.found.lock().unwrap().disks_closed);
}

/// Moves a guest whose destination is gone when `when` says so, and followed by one that knows only
/// its record.
fn received_by_another(this: &mut Move, when: impl Fn(&Progress) -> bool) -> Measures {
    let dir = std::env::temp_dir();
    let name = format!("godwit-to-{}-{:?}", std::process::id(), std::thread::current().id());
    let (record, left) = (dir.join(format!("{name}-1")), dir.join(format!("{name}-2")));
    this.kept = Some(record.clone());
    let (to, receiving) = this.receive();
    let proxy = Proxy::new(&to, &[]);
    let cancel = std::mem::take(&mut this.cancel);
    this.kept = Some(left.clone());
    // One that is started wrongly goes before: its machine has not the disks.
    let images = std::mem::take(&mut this.images);
    let wrong = (!images.is_empty()).then(|| this.receiver());
    this.images = images;
    let mut second = Some((this.receiver(), wrong, receiving));
    let (link, handle) = (proxy.clone(), this.handle.clone());
    let mut follower = None;
    let result = this.migrate(&proxy, &mut |progress| {
        if when(progress)
            && let Some((second, wrong, first)) = second.take()
        {
            // What is left when it is killed: the lock is not, nor what it would still say.
            link.cut_for_good();
            std::fs::copy(&record, &left).unwrap();
            cancel.cancel();
            assert!(first.join().unwrap().is_err());
            if let Some(wrong) = wrong {
                let refused = wrong().1.join().unwrap().unwrap_err();
                let words = refused.to_string();
                assert!(words.contains("there is no disk"), "{words}");
                assert!(words.contains(&left.display().to_string()), "{words}");
                assert!(left.exists(), "it is lost to who comes next");
            }
            let (to, receiving) = second();
            handle.go_by(Some(to), None);
            follower = Some(receiving);
        }
    });
    let received = follower.unwrap().join().unwrap();
    assert!(result.is_ok() && received.is_ok(), "{result:?} {received:?}");
    assert!(!record.exists() && !left.exists());
    this.check_arrived();
    result.unwrap()
}

#[test]
fn a_destination_that_was_killed_is_followed_by_one_to_which_only_the_rest_is_sent() {
    // Mutations: what there is is not asked for, so that what was not acknowledged is sent again;
    // nothing is proven, since what was placed before counts as not placed.
    for verify in [source::Verify::Live, source::Verify::Stopped] {
        let mut this = Move::new(Duration::from_millis(100), 30, Vec::new());
        this.options.verify = verify;
        let measures = received_by_another(&mut this, |progress| progress.sent.0 > 12 * MIB);
        assert_eq!((measures.resumptions, measures.verified), (1, true));
        let sent = data_bytes(&measures);
        println!("{sent} of {RAM}");
        assert!(sent < RAM + RAM / 4, "{sent} of {RAM}");
    }
}

#[test]
fn a_destination_with_disks_that_was_killed_is_followed_by_another() {
    // Mutation: a godwit that cannot begin takes the record away.
    let (disks, images) = disks(Duration::from_millis(1));
    let mut this = Move::new(BUSY, 30, disks);
    this.images = images;
    received_by_another(&mut this, |progress| progress.sent.0 > 20 * MIB);
    assert!(this.found.lock().unwrap().disks_closed);
}

#[test]
fn a_destination_that_was_killed_under_a_busy_guest_is_followed_by_another() {
    // Mutation: what there is is not asked for.
    for channels in [1, 3] {
        let mut this = Move::new(BUSY, 60, Vec::new());
        this.options.channels = channels;
        received_by_another(&mut this, |progress| progress.sent.0 > RAM + 5 * MIB);
    }
}

#[test]
fn a_cut_while_both_sides_get_ready_is_made_good() {
    for late in [false, true] {
        let mut this = Move::new(BUSY, 60, Vec::new());
        let (proxy_in, proxy_out) = std::sync::mpsc::channel::<Proxy>();
        let ready = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&ready);
        let mut cut = false;
        this.while_preparing = Box::new(move || {
            told.store(true, Ordering::SeqCst);
            // The answer never arrives.
            if !late && !std::mem::replace(&mut cut, true) {
                proxy_out.recv().unwrap().cut(OUTAGE);
            }
        });
        let (to, receiving) = this.receive();
        let proxy = Proxy::new(&to, &[]);
        proxy_in.send(proxy.clone()).unwrap();
        let link = proxy.clone();
        let mut looks = 0;
        let result = this.migrate(&proxy, &mut |progress| {
            // In a round that is made with both sides ready.
            let closing = late && ready.load(Ordering::SeqCst) && !progress.round_ended;
            if closing && progress.stage == Stage::PreCopy && progress.severed.is_none() {
                looks += 1;
                if looks == 1 {
                    link.cut(OUTAGE);
                }
            }
        });
        let received = receiving.join().unwrap();
        assert!(result.is_ok() && received.is_ok(), "{result:?} {received:?}");
        this.check_arrived();
        assert_eq!(proxy.cuts_made(), 1, "late: {late}");
        assert_eq!(result.unwrap().resumptions, 1);
    }
}

#[test]
fn one_channel_that_is_cut_takes_all_with_it_and_all_come_back() {
    for number in 0..3 {
        let mut this = Move::new(BUSY, 40, Vec::new());
        let (to, receiving) = this.receive();
        let proxy = Proxy::new(&to, &[]);
        let link = proxy.clone();
        let mut cut = false;
        let result = this.migrate(&proxy, &mut |progress| {
            if progress.sent.0 > 5 * MIB && !std::mem::replace(&mut cut, true) {
                link.cut_one(number);
            }
        });
        let received = receiving.join().unwrap();
        assert!(result.is_ok() && received.is_ok(), "{result:?} {received:?}");
        this.check_arrived();
        let measures = result.unwrap();
        assert_eq!(measures.resumptions, 1);
        assert!(measures.severed < Duration::from_secs(4), "{:?}", measures.severed);
    }
}

#[test]
fn a_link_that_stands_and_carries_nothing_is_made_again() {
    // It is found by the silence; the destination is asked before it has noticed it, or after.
    let mut this = Move::new(BUSY, 40, Vec::new());
    let (to, receiving) = this.receive();
    let proxy = Proxy::new(&to, &[]);
    let link = proxy.clone();
    let mut frozen = false;
    let result = this.migrate(&proxy, &mut |progress| {
        if progress.sent.0 > 5 * MIB && !std::mem::replace(&mut frozen, true) {
            link.freeze();
        }
    });
    let received = receiving.join().unwrap();
    assert!(result.is_ok() && received.is_ok(), "{result:?} {received:?}");
    this.check_arrived();
    assert!(result.unwrap().resumptions >= 1);
}

#[test]
fn a_source_that_comes_back_is_believed_before_its_old_connections_are_seen_to_end() {
    // Mutation: the destination hears a new connection only when the old ones have ended. Here they
    // never do for it.
    let mut this = Move::new(BUSY, 40, Vec::new());
    let (to, receiving) = this.receive();
    let (first, second) = (Proxy::new(&to, &[]), Proxy::new(&to, &[]));
    let (link, way) = (first.clone(), second.address());
    let handle = this.handle.clone();
    let mut frozen = None;
    let began = Instant::now();
    let result = this.migrate(&first, &mut |progress| {
        if progress.sent.0 > 5 * MIB && frozen.is_none() {
            frozen = Some(Instant::now());
            handle.go_by(Some(way.clone()), Some(4));
            // The source's ends are gone, the destination's stand.
            link.abandon();
        }
    });
    let received = receiving.join().unwrap();
    assert!(result.is_ok() && received.is_ok(), "{result:?} {received:?}");
    this.check_arrived();
    let measures = result.unwrap();
    assert_eq!((measures.resumptions, measures.channels), (1, 4));
    assert!(began.elapsed() < Duration::from_secs(9), "it was noticed by silence");
}

#[test]
fn it_goes_on_by_another_way_with_another_number_of_channels() {
    for channels in [1, 4] {
        let mut this = Move::new(BUSY, 60, Vec::new());
        let (to, receiving) = this.receive();
        let (first, second) = (Proxy::new(&to, &[]), Proxy::new(&to, &[(9 * MIB, OUTAGE)]));
        let (link, way) = (first.clone(), second.address());
        let handle = this.handle.clone();
        let mut cut = false;
        let result = this.migrate(&first, &mut |progress| {
            if progress.sent.0 > 5 * MIB && !std::mem::replace(&mut cut, true) {
                handle.go_by(Some(way.clone()), Some(channels));
                link.cut_for_good();
            }
        });
        let received = receiving.join().unwrap();
        assert!(result.is_ok() && received.is_ok(), "{result:?} {received:?}");
        this.check_arrived();
        let measures = result.unwrap();
        assert_eq!((measures.resumptions, measures.channels), (2, usize::from(channels)));
        assert!(second.carried() > 9 * MIB);
    }
}

#[test]
fn no_old_frame_is_placed_behind_a_resumption() {
    // Mutation: the destination answers before its channels have ended. Each channel in turn is so
    // slow that the frame that it has when the link is cut would be placed when the source has long
    // been back, and has sent these pages once more; the guest rests by then, so what is wrong
    // stays wrong.
    for slow in 0..2 {
        let mut this = Move::new(Duration::from_millis(700), 12, Vec::new());
        this.faults.slow_channel = Some((slow, Duration::from_millis(1500)));
        let (measures, cuts) = this.arrives(&[(4 * MIB, Duration::from_millis(20))]);
        assert_eq!((cuts, measures.resumptions), (1, 1));
    }
}

#[test]
fn when_its_time_is_over_the_guest_stays_and_both_sides_let_go() {
    let mut this = Move::new(BUSY, 40, Vec::new());
    this.options.reconnect = Duration::from_secs(2);
    this.keep = Duration::from_secs(3);
    let (to, receiving) = this.receive();
    let proxy = Proxy::new(&to, &[(5 * MIB, BUSY)]);
    let began = Instant::now();
    let mut shown = Vec::new();
    let failure =
        this.migrate(&proxy, &mut |progress| shown.extend(progress.severed.clone())).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(6));
    this.check_stayed(&failure);
    assert_eq!(failure.phase, Phase::PreCopy);
    let words = failure.to_string();
    assert!(
        words.starts_with("the connection to the destination broke")
            && words.contains("could not be taken up again within 2s (at last:"),
        "{words}"
    );
    // What an operator sees meanwhile.
    assert!(shown.len() > 5 && shown.iter().any(|severed| severed.attempts > 2), "{shown:?}");
    assert!(shown.iter().all(|severed| severed.left <= Duration::from_secs(2)));
    let failure = receiving.join().unwrap().unwrap_err();
    assert_eq!(failure.survivor, Survivor::Source);
    let words = failure.to_string();
    assert!(
        words.starts_with("the connection to the source broke")
            && words.contains("could not be taken up again within 3s"),
        "{words}"
    );
    assert_eq!(this.was_told(|notice| matches!(notice, Notice::Severed { .. })), 1);
}

#[test]
fn who_does_not_want_it_fails_at_once() {
    for here in [true, false] {
        let mut this = Move::new(BUSY, 40, Vec::new());
        this.options.reconnect = Duration::ZERO;
        if !here {
            // It cannot be told that nobody is there any more.
            (this.options.reconnect, this.keep) = (Duration::from_secs(2), Duration::ZERO);
        }
        let (to, receiving) = this.receive();
        let proxy = Proxy::new(&to, &[(5 * MIB, Duration::ZERO)]);
        let began = Instant::now();
        let failure = this.migrate(&proxy, &mut |_| {}).unwrap_err();
        this.check_stayed(&failure);
        let failure = receiving.join().unwrap().unwrap_err();
        assert!(failure.to_string().starts_with("the connection to the source broke"), "{failure}");
        assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    }
}

#[test]
fn a_wish_to_cancel_is_heard_on_both_sides_while_severed() {
    for here in [true, false] {
        let mut this = Move::new(BUSY, 40, Vec::new());
        this.options.reconnect = Duration::from_secs(20);
        this.keep = Duration::from_secs(if here { 4 } else { 20 });
        let (to, receiving) = this.receive();
        let proxy = Proxy::new(&to, &[(5 * MIB, BUSY)]);
        let (cancel, link) = (this.cancel.clone(), proxy.clone());
        let own = this.handle.cancel().clone();
        let mut wished = None;
        let failure = this
            .migrate(&proxy, &mut |progress| {
                let long = progress.severed.as_ref().is_some_and(|severed| severed.attempts > 3);
                if long && wished.is_none() {
                    wished = Some(Instant::now());
                    if here {
                        own.cancel()
                    } else {
                        cancel.cancel()
                    }
                    // One that has let go says so to whoever gets through to it.
                    link.mend();
                }
            })
            .unwrap_err();
        this.check_stayed(&failure);
        if here {
            assert!(wished.unwrap().elapsed() < Duration::from_secs(2));
            assert!(matches!(failure.cause, EngineError::Cancelled), "{failure}");
        }
        let failure = receiving.join().unwrap().unwrap_err();
        assert_eq!(matches!(failure.cause, EngineError::Cancelled), !here, "{failure}");
    }
}

#[test]
fn a_stranger_who_knows_the_session_is_refused_and_so_is_another_source() {
    // Mutations: the proof is not looked at; one attempt is taken twice.
    let mut this = Move::new(BUSY, 40, Vec::new());
    let (to, receiving) = this.receive();
    let proxy = Proxy::new(&to, &[(5 * MIB, Duration::from_secs(5))]);
    let (far, link) = (to.to_string(), proxy.clone());
    let mut tried = false;
    let mut other = None;
    let result = this.migrate(&proxy, &mut |progress| {
        if progress.severed.is_none() || std::mem::replace(&mut tried, true) {
            return;
        }
        // Time for the destination to have noticed, too.
        std::thread::sleep(Duration::from_millis(300));
        let session = link.session().unwrap();
        for attempt in [1, 1000] {
            let mut stream = TcpStream::connect(&far).unwrap();
            let greeting =
                Greeting { version: Version::NEWEST, session, role: Role::Resume, attempt };
            stream.write_all(&greeting.encode()).unwrap();
            let proof = [7; 32];
            stream.write_all(&Message::Resume { channels: 2, proof }.encode()).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
            let mut said = [0; GREETING_LEN];
            assert!(!matches!(stream.read(&mut said), Ok(1..)), "it was answered");
        }
        let mut second = Source::start(BUSY, Vec::new());
        let to = far.parse().unwrap();
        let options = source::Options { reconnect: Duration::ZERO, ..source::Options::new(to) };
        let handle = MigrationHandle::default();
        other = migrate(&mut second, &options, &handle, &mut |_| {}).err();
    });
    let received = receiving.join().unwrap();
    assert!(result.is_ok() && received.is_ok(), "{result:?} {received:?}");
    this.check_arrived();
    let words = "not prove the session's secret";
    let refused = |notice: &Notice| matches!(notice, Notice::Refused(why) if why.contains(words));
    assert_eq!(this.was_told(refused), 2, "{:?}", this.told.lock().unwrap());
    let words = other.unwrap().to_string();
    assert!(
        words.starts_with("the destination is busy") && words.contains("keeps for it what has"),
        "{words}"
    );
}

#[test]
fn who_comes_back_to_another_destination_is_told_so() {
    let mut this = Move::new(BUSY, 40, Vec::new());
    this.keep = Duration::from_secs(2);
    let (to, receiving) = this.receive();
    let mut fresh = Move::new(BUSY, 40, Vec::new());
    let (other, waiting) = fresh.receive();
    let (first, second) = (Proxy::new(&to, &[]), Proxy::new(&other, &[]));
    let (link, way) = (first.clone(), second.address());
    let handle = this.handle.clone();
    let mut cut = false;
    let failure = this
        .migrate(&first, &mut |progress| {
            if progress.sent.0 > 5 * MIB && !std::mem::replace(&mut cut, true) {
                handle.go_by(Some(way.clone()), None);
                link.cut_for_good();
            }
        })
        .unwrap_err();
    this.check_stayed(&failure);
    assert!(failure.to_string().contains("it knows nothing of this migration"), "{failure}");
    assert!(receiving.join().unwrap().is_err());
    fresh.cancel.cancel();
    assert!(waiting.join().unwrap().is_err());
}

#[test]
fn a_guest_that_is_held_back_runs_free_while_severed() {
    // Mutation: the throttle stays, or does not come back.
    let mut this = Move::new(BUSY, 60, Vec::new());
    let throttles = Arc::<Mutex<Vec<f64>>>::default();
    this.source.throttles = Some(Arc::clone(&throttles));
    let settings = Settings {
        downtime_limit: Duration::from_millis(5),
        downtime_ceiling: None,
        patience: None,
        throttle: ThrottleMode::AutoConverge,
        ..Settings::default()
    };
    let own = Own { max_bandwidth: Some("60MiB/s".parse().unwrap()), ..Own::default() };
    this.handle = MigrationHandle::new(settings, own, Cancel::default());
    let (to, receiving) = this.receive();
    let proxy = Proxy::new(&to, &[]);
    let (link, handle) = (proxy.clone(), this.handle.clone());
    let (mut before, mut free, mut after) = (None, 0, None);
    let result = this.migrate(&proxy, &mut |progress| match (
        before,
        &progress.severed,
        progress.throttle,
    ) {
        (None, _, held) if held > 0.0 => {
            before = Some(held);
            link.cut(3 * OUTAGE);
        }
        (Some(_), Some(_), held) => {
            assert_eq!((held, *throttles.lock().unwrap().last().unwrap()), (0.0, 0.0));
            free += 1;
        }
        (Some(_), None, held) if held > 0.0 && free > 0 && after.is_none() => {
            after = Some(held);
            handle.switch_over(true).unwrap();
        }
        _ => {}
    });
    let received = receiving.join().unwrap();
    assert!(result.is_ok() && received.is_ok(), "{result:?} {received:?}");
    this.check_arrived();
    assert!(free > 3, "it was looked at {free} times");
    assert!(after >= before, "{before:?}, then {after:?}");
}

fn disks(slow: Duration) -> (Vec<Arc<SourceDisk>>, Vec<Arc<Image>>) {
    const DISKS: [(&str, u64); 2] = [("system", (12 << 20) + 1536), ("data", 5 << 20)];
    let disk = |(name, size): (&str, u64)| {
        let mut disk = SourceDisk::new(name, size);
        disk.slow = slow;
        Arc::new(disk)
    };
    let image = |(name, size): (&str, u64)| Arc::new(Image::new(name, size));
    (DISKS.map(disk).into(), DISKS.map(image).into())
}

#[test]
fn what_survived_cuts_can_be_audited_with_its_disks() {
    // Regression: a source that had lost its connections was taken for one that knows nothing, and
    // told what the closed disks hold, which was not what it asked for.
    let (disks, images) = disks(Duration::from_millis(1));
    let mut this = Move::new(BUSY, 30, disks);
    this.images = images;
    this.options.audit = true;
    let (measures, made) = this.arrives(&[(5 * MIB, OUTAGE), (20 * MIB, OUTAGE)]);
    assert!(made >= 1 && u64::from(measures.resumptions) == made, "{made} cuts");
    assert!(measures.audit.is_some_and(|audit| audit.is_clean()));
    assert!(measures.disks.iter().all(|disk| disk.verified));
}

#[test]
fn disks_survive_cuts_in_their_full_pass_and_behind_it() {
    for (cuts, channels) in [
        (vec![(MIB, OUTAGE)], 2),
        (vec![(5 * MIB, OUTAGE), (7 * MIB, OUTAGE), (9 * MIB, OUTAGE)], 1),
        (vec![(14 * MIB, OUTAGE), (20 * MIB, OUTAGE), (30 * MIB, OUTAGE)], 3),
    ] {
        let (disks, images) = disks(Duration::from_millis(1));
        let mut this = Move::new(BUSY, 30, disks);
        this.images = images;
        this.options.channels = channels;
        let (measures, made) = this.arrives(&cuts);
        assert!(made >= 1 && u64::from(measures.resumptions) == made, "{made} of {cuts:?}");
        assert!(this.found.lock().unwrap().disks_closed);
    }
}

#[test]
fn of_a_disk_that_stays_as_it_is_little_is_sent_again() {
    let (disks, images) = disks(Duration::from_millis(1));
    let size: u64 = disks.iter().map(|disk| disk.disk().size.0).sum();
    let mut this = Move::new(Duration::from_millis(1), 30, disks);
    this.images = images;
    let (measures, _) = this.arrives(&[(6 * MIB, OUTAGE)]);
    assert_eq!(measures.resumptions, 1);
    let data: u64 = measures.disks.iter().map(|disk| disk.data.bytes().0).sum();
    assert!(data <= size + measures.sent_again.0, "{data} of {size}");
    assert!(measures.sent_again.0 < size, "{}", measures.sent_again);
}

#[test]
fn of_disks_too_only_the_rest_is_sent_to_a_destination_that_follows_another() {
    // Mutation: what was not acknowledged counts as placed, or all is sent again.
    let (disks, images) = disks(Duration::from_millis(30));
    let size: u64 = disks.iter().map(|disk| disk.disk().size.0).sum();
    let mut this = Move::new(Duration::from_millis(1), 30, disks);
    this.images = images;
    // In the full pass, which takes a second.
    let measures = received_by_another(&mut this, |progress| {
        progress.round == 0 && !progress.round_ended && progress.sent.0 > MIB
    });
    let data: u64 = measures.disks.iter().map(|disk| disk.data.bytes().0).sum();
    assert!(data <= size + measures.sent_again.0, "{data} of {size}");
    assert!(this.found.lock().unwrap().disks_closed);
}
