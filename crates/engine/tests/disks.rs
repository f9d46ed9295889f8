//! Disks that move along, between two machines made up for the purpose.
#![allow(clippy::unwrap_used)]

mod machine;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use godwit_disk::DiskChoice;
use godwit_engine::address::Listener;
use godwit_engine::destination::{self, Faults};
use godwit_engine::handle::{MigrationHandle, Own};
use godwit_engine::report::Measures;
use godwit_engine::vm::SourceVm;
use godwit_engine::{Cancel, Failure, Survivor};
use godwit_memory::RamBlock;
use godwit_policy::Settings;
use godwit_units::{ByteCount, PageCount};
use godwit_wire::{
    BlockOffer, DiskOffer, Features, FrameKind, GREETING_LEN, Greeting, HEADER_LEN, Message, Offer,
    Role, SessionId, Version,
};

use machine::{Destination, Found, Image, Source, SourceDisk, blocks, bytes, options, run};

/// One ends within a page, and within a dirty block.
const DISKS: [(&str, u64); 2] = [("system", (6 << 20) + 1536), ("data", 3 << 20)];

struct Pair {
    source: Source,
    images: Vec<Arc<Image>>,
    found: Arc<Mutex<Found>>,
    faults: Faults,
}

impl Pair {
    fn new(busy: Duration, change: impl Fn(&mut SourceDisk)) -> Self {
        let disk = |(name, size): (&str, u64)| {
            let mut disk = SourceDisk::new(name, size);
            change(&mut disk);
            Arc::new(disk)
        };
        let source = Source::start(busy, DISKS.map(disk).into());
        let images = DISKS.map(|(name, size)| Arc::new(Image::new(name, size))).into();
        Self { source, images, found: Arc::default(), faults: Faults::default() }
    }

    fn migrate(&mut self, channels: u8, handle: &MigrationHandle) -> Result<Measures, Failure> {
        let destination = self.destination();
        run(&mut self.source, destination, &options(channels, false), self.faults, handle)
    }

    fn destination(&self) -> Destination {
        let (images, found) = (self.images.clone(), Arc::clone(&self.found));
        Destination { images, found, ..Destination::of(&self.source) }
    }

    fn check_moved(&self, result: &Result<Measures, Failure>) {
        assert!(result.is_ok(), "{result:?}");
        let found = self.found.lock().unwrap();
        assert_eq!(
            found.pages_first,
            Some(true),
            "memory and disks were in place before the state"
        );
        assert!(found.ran && self.source.retired);
        let disks = self.source.disks.iter().zip(&self.images);
        disks.for_each(|(from, to)| assert!(to.holds(from), "'{}' differs", from.disk().name));
    }

    fn check_untouched(&self, result: &Result<Measures, Failure>, words: &str) {
        let failure = result.as_ref().unwrap_err();
        assert_eq!(failure.survivor, Survivor::Source);
        assert!(failure.to_string().contains(words), "{failure}");
        assert!(self.source.running.load(Ordering::Relaxed) && self.source.guest.is_some());
        assert!(!self.found.lock().unwrap().ran && !self.source.retired);
    }
}

const BUSY: Duration = Duration::from_millis(600);

fn handle(change: impl FnOnce(&mut Settings)) -> MigrationHandle {
    let mut settings =
        Settings { downtime_limit: Duration::from_secs(10), patience: None, ..Settings::default() };
    change(&mut settings);
    MigrationHandle::new(settings, Own::default(), Cancel::default())
}

#[test]
fn disks_arrive_as_they_are_when_the_guest_stands_still() {
    for channels in [1, 3] {
        let mut pair = Pair::new(Duration::from_secs(60), |_| {});
        let result = pair.migrate(channels, &handle(|_| {}));
        pair.check_moved(&result);
        let measures = result.unwrap();
        let first = measures.round_list[0];
        assert_eq!(
            (first.data, first.zero),
            (PageCount::ZERO, PageCount::ZERO),
            "memory waits for the full pass"
        );
        assert!(first.disk_sent.0 > 0);
        let names: Vec<_> =
            measures.disks.iter().map(|disk| (disk.name.as_str(), disk.size.0)).collect();
        assert_eq!(names, DISKS);
        assert!(
            measures.disks.iter().all(|disk| disk.data.0 > 0 && disk.zero.0 > 0 && disk.sent.0 > 0)
        );
    }
}

#[test]
fn an_old_version_never_lands_on_a_newer_one() {
    // Each channel in turn is late, with many short rounds; the guest leaves the disks alone in the
    // end, so what is wrong stays wrong.
    for slow in 1..3 {
        let mut pair = Pair::new(BUSY, |_| {});
        pair.faults.slow_channel = Some((slow, Duration::from_millis(20)));
        let handle = handle(|settings| settings.downtime_limit = Duration::from_millis(30));
        let forced = handle.clone();
        let wait = BUSY * 2;
        let force = std::thread::spawn(move || {
            std::thread::sleep(wait);
            let _ = forced.switch_over(true);
        });
        let result = pair.migrate(1, &handle);
        pair.check_moved(&result);
        force.join().unwrap();
    }
}

#[test]
fn a_switchover_is_forced_before_the_full_pass_and_within_it() {
    for reads in [0, 20] {
        let mut pair =
            Pair::new(Duration::from_secs(60), |disk| disk.slow = Duration::from_millis(2));
        let handle = handle(|_| {});
        let disk = Arc::clone(&pair.source.disks[0]);
        let forced = handle.clone();
        let force = move || {
            while disk.reads.load(Ordering::SeqCst) < reads {
                std::thread::sleep(Duration::from_millis(1));
            }
            forced.switch_over(true).unwrap();
        };
        if reads == 0 {
            force();
        } else {
            std::thread::spawn(force);
        }
        let result = pair.migrate(2, &handle);
        pair.check_moved(&result);
        assert_eq!(
            result.unwrap().round_list.len(),
            2,
            "the first round, cut short, and the last one"
        );
    }
}

#[test]
fn a_full_disk_at_the_destination_leaves_the_guest_at_the_source() {
    let mut pair = Pair::new(Duration::from_secs(60), |_| {});
    pair.images[1].fault.lock().unwrap().writes_left = Some(3);
    let result = pair.migrate(2, &handle(|_| {}));
    pair.check_untouched(&result, "no space is left on the disk");
    // And a second attempt finds everything as it should be.
    let images = DISKS.map(|(name, size)| Arc::new(Image::new(name, size)));
    let mut again = Pair { images: images.into(), ..Pair::new(Duration::from_secs(60), |_| {}) };
    let result = again.migrate(2, &handle(|_| {}));
    again.check_moved(&result);
}

#[test]
fn a_disk_that_cannot_be_read_leaves_the_guest_at_the_source() {
    let mut pair = Pair::new(Duration::from_secs(60), |disk| disk.reads_left = 30.into());
    let result = pair.migrate(2, &handle(|_| {}));
    pair.check_untouched(&result, "cannot be read at");
}

#[test]
fn a_destination_without_room_or_without_the_disk_refuses_before_anything_is_written() {
    for (replaced, words) in [
        (Image::new("data", (3 << 20) - 1), "disk 'data' has 3145727 bytes, too few for 3145728"),
        (Image::new("other", 3 << 20), "there is no disk 'data' here"),
    ] {
        let mut pair = Pair::new(Duration::from_secs(60), |_| {});
        pair.images[1] = Arc::new(replaced);
        let result = pair.migrate(2, &handle(|_| {}));
        pair.check_untouched(&result, words);
        assert!(
            pair.images
                .iter()
                .all(|image| image.written.load(Ordering::SeqCst) == 0 && !image.is_open())
        );
    }
}

#[test]
fn a_slow_disk_holds_up_nobody_else() {
    // The guest is at rest; the first disk's sink does not go on until memory and the other disk
    // are in place.
    let mut pair = Pair::new(Duration::ZERO, |_| {});
    let (source_ram, ram) = (pair.source.ram(), blocks());
    source_ram[0].write(godwit_units::PageIndex(5), &[5; 4096]).unwrap();
    let (other, disk) = (Arc::clone(&pair.images[1]), Arc::clone(&pair.source.disks[1]));
    let until = Instant::now() + Duration::from_secs(60);
    let held_up = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (watched, told) = (Arc::clone(&ram), Arc::clone(&held_up));
    pair.images[0].fault.lock().unwrap().waits_for = Some(Box::new(move || {
        told.store(Instant::now() > until, Ordering::SeqCst);
        Instant::now() > until || bytes(&watched) == bytes(&source_ram) && other.holds(&disk)
    }));
    let destination = Destination { ram, ..pair.destination() };
    let handle = handle(|settings| settings.memory_share = Some(1024));
    let result = run(&mut pair.source, destination, &options(1, false), Faults::default(), &handle);
    pair.check_moved(&result);
    assert!(!held_up.load(Ordering::SeqCst), "memory or the other disk waited for the slow one");
}

#[test]
fn what_is_written_while_both_get_ready_is_not_left_for_the_last_round() {
    // Mutation: the round behind Prepare is taken for the last one, and the disks are closed in it.
    let mut pair = Pair::new(Duration::from_secs(60), |_| {});
    let destination =
        Destination { while_preparing: pair.source.rests_while_preparing(), ..pair.destination() };
    let result =
        run(&mut pair.source, destination, &options(2, false), Faults::default(), &handle(|_| {}));
    pair.check_moved(&result);
    let rounds = result.unwrap().round_list;
    // Its barriers are all that the disks' channels carry.
    assert!(rounds.last().unwrap().disk_sent.0 < 4096, "{rounds:?}");
}

/// The next frame that says more than that its sender is there: kind and payload.
fn frame(stream: &mut TcpStream) -> (u16, Vec<u8>) {
    loop {
        let mut header = [0; HEADER_LEN];
        stream.read_exact(&mut header).unwrap();
        let length = u32::from_le_bytes(header[4..8].try_into().unwrap());
        let mut payload = vec![0; length as usize];
        stream.read_exact(&mut payload).unwrap();
        let kind = u16::from_le_bytes([header[0], header[1]]);
        if kind != FrameKind::Alive as u16 {
            return (kind, payload);
        }
    }
}

#[test]
fn a_source_that_ends_its_state_before_the_last_round_of_disks_is_refused() {
    // Mutation: the guest is loaded while its disks are still written.
    let source_ram = blocks();
    let images: Vec<_> = DISKS.map(|(name, size)| Arc::new(Image::new(name, size))).into();
    let mut destination = Destination {
        images,
        while_loading: Box::new(|| panic!("it is loaded")),
        ..Destination::beside(Arc::clone(&source_ram))
    };
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let to = listener.address().unwrap().to_string();
    let receiving = std::thread::spawn(move || {
        let options =
            destination::Options { disks: DiskChoice::All, ..destination::Options::default() };
        destination::receive(&mut destination, &listener, &options, &Cancel::default(), &mut |_| {})
            .map(drop)
    });
    let session = SessionId([7; 16]);
    let connect = |role| {
        let mut stream = TcpStream::connect(&to).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let version = Version::NEWEST;
        stream.write_all(&Greeting { version, session, role, attempt: 0 }.encode()).unwrap();
        stream
    };
    let mut control = connect(Role::Control);
    control.read_exact(&mut [0; GREETING_LEN]).unwrap();
    let block =
        |block: &RamBlock| BlockOffer { name: block.name().to_owned(), pages: block.pages() };
    let disk = |(name, size): (&str, u64)| DiskOffer {
        name: name.to_owned(),
        size: ByteCount(size),
        granularity: ByteCount::ZERO,
    };
    let offer = Offer {
        channels: 1,
        codecs: 0,
        features: Features::NONE,
        verify: false,
        running: true,
        machine: "made-up".to_owned(),
        blocks: source_ram.iter().map(block).collect(),
        disks: DISKS.map(disk).into(),
    };
    control.write_all(&Message::Offer(offer).encode()).unwrap();
    while let (kind, mut question) = frame(&mut control)
        && kind == FrameKind::Question as u16
    {
        question.reverse();
        control.write_all(&Message::Answer(question).encode()).unwrap();
    }
    let _channels = [0, 1, 2].map(|number| connect(Role::Channel(number)));
    control.write_all(&Message::Prepare.encode()).unwrap();
    assert_eq!(frame(&mut control).0, FrameKind::Prepared as u16);
    control.write_all(&Message::DeviceStateEnd.encode()).unwrap();
    let (kind, text) = frame(&mut control);
    assert_eq!(kind, FrameKind::Abort as u16);
    let text = String::from_utf8_lossy(&text[2..]).into_owned();
    assert!(text.contains("all device state before the last round of its disks"), "{text}");
    let failure = receiving.join().unwrap().unwrap_err();
    assert_eq!(failure.survivor, Survivor::Source);
}
