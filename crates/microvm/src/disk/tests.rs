//! The disk as a guest's driver sees it, and as a hostile one might.

use godwit_virtio::{DEVICE_WRITES, NEXT};

use super::*;
use crate::layout::check;

struct Rig {
    ram: GuestRam,
    disk: Disk,
    path: std::path::PathBuf,
}

const TABLE: u64 = 0x1000;
const DRIVER: u64 = 0x2000;
const DEVICE: u64 = 0x3000;
const HEADER: u64 = 0x4000;
const DATA: u64 = 0x5000;
const STATUS: u64 = 0x6000;

fn ram() -> GuestRam {
    let plan = vec!["name=low,size=16MiB,gpa=0".parse().unwrap()];
    GuestRam::new(&check(plan).unwrap()).unwrap()
}

impl Rig {
    fn new(name: &str) -> Self {
        let ram = ram();
        let path = std::env::temp_dir().join(format!("godwit-disk-{name}-{}", std::process::id()));
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let disk = Disk::open(&path).unwrap();
        let rig = Self { ram, disk, path };
        for (register, value) in [(0x70, 3), (0x24, 1), (0x20, 1), (0x70, 11), (0x30, 0), (0x38, 4)]
        {
            rig.set(register, value);
        }
        for (register, address) in [(0x80, TABLE), (0x90, DRIVER), (0xa0, DEVICE)] {
            rig.set(register, address as u32);
            rig.set(register + 4, 0);
        }
        rig.set(0x44, 1);
        rig.set(0x70, 15);
        rig
    }

    fn set(&self, register: u64, value: u32) {
        self.disk.write(register, &value.to_le_bytes(), &self.ram);
    }

    fn get(&self, register: u64) -> u32 {
        let mut bytes = [0; 4];
        self.disk.read(register, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.ram.write(at, bytes).unwrap();
    }

    fn descriptor(&self, index: u64, address: u64, len: u32, flags: u16, next: u16) {
        let words = [
            &address.to_le_bytes()[..],
            &len.to_le_bytes(),
            &flags.to_le_bytes(),
            &next.to_le_bytes(),
        ];
        self.put(TABLE + 16 * index, &words.concat());
    }

    /// One request with one page of data; the status.
    fn request(&self, number: u16, kind: u32, sector: u64) -> u8 {
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.put(HEADER, &header);
        self.put(STATUS, &[0xee]);
        self.descriptor(0, HEADER, 16, NEXT, 1);
        self.descriptor(1, DATA, 4096, if kind == 0 { NEXT | DEVICE_WRITES } else { NEXT }, 2);
        self.descriptor(2, STATUS, 1, DEVICE_WRITES, 0);
        self.notify(number);
        let mut status = [0];
        self.ram.read(STATUS, &mut status).unwrap();
        status[0]
    }

    fn notify(&self, number: u16) {
        self.put(DRIVER + 4 + 2 * u64::from(number % 4), &[0, 0]);
        self.put(DRIVER + 2, &(number + 1).to_le_bytes());
        self.set(0x50, 0);
    }

    fn needs_reset(&self) -> bool {
        self.get(0x70) & 64 != 0
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[test]
fn what_is_written_is_read_also_after_a_move() {
    let rig = Rig::new("moves");
    rig.put(DATA, &[9; 4096]);
    assert_eq!(rig.request(0, 1, 8), 0);
    rig.put(DATA, &[0; 4096]);
    let other = Disk::open(&rig.path).unwrap();
    other.load(&rig.disk.save()).unwrap();
    assert_eq!(other.save(), rig.disk.save());
    let rig = Rig { disk: other, path: rig.path.clone(), ram: ram() }.with_ram_of(rig);
    assert_eq!(rig.request(1, 0, 8), 0);
    let mut page = [0; 4096];
    rig.ram.read(DATA, &mut page).unwrap();
    assert_eq!(page, [9; 4096]);
    let mut used = [0; 2];
    rig.ram.read(DEVICE + 2, &mut used).unwrap();
    assert_eq!(used, [2, 0]);
}

impl Rig {
    fn with_ram_of(mut self, other: Self) -> Self {
        let mut other = std::mem::ManuallyDrop::new(other);
        std::mem::swap(&mut self.ram, &mut other.ram);
        self
    }
}

#[test]
fn requests_beyond_the_end_fail_and_the_device_goes_on() {
    let rig = Rig::new("beyond");
    assert_eq!(rig.request(0, 0, 2041), 1);
    assert_eq!(rig.request(1, 1, u64::MAX), 1);
    assert_eq!(rig.request(2, 77, 0), 2);
    assert_eq!(rig.request(3, 4, 0), 0);
    assert_eq!(rig.request(4, 0, 2040), 0);
    assert!(!rig.needs_reset());
}

#[test]
fn a_queue_that_makes_no_sense_needs_a_reset() {
    type Spoil = fn(&Rig);
    let cases: [(&str, Spoil); 4] = [
        ("loop", |rig| rig.descriptor(0, HEADER, 16, NEXT, 0)),
        ("index", |rig| rig.descriptor(0, HEADER, 16, NEXT, 9)),
        ("nowhere", |rig| rig.descriptor(0, 1 << 60, 16, 0, 0)),
        ("table", |rig| rig.set(0x84, 0xffff)),
    ];
    for (name, spoil) in cases {
        let rig = Rig::new(name);
        spoil(&rig);
        rig.notify(0);
        assert!(rig.needs_reset(), "{name}");
    }
    let rig = Rig::new("far");
    rig.put(DRIVER + 2, &900_u16.to_le_bytes());
    rig.set(0x50, 0);
    assert!(rig.needs_reset());
}

#[test]
fn a_state_that_does_not_fit_is_refused() {
    let rig = Rig::new("fit");
    let mut state = rig.disk.save();
    assert!(matches!(rig.disk.load(&state[1..]), Err(StateError::Malformed(_))));
    // The size of the queue.
    state[80] = 3;
    assert!(matches!(rig.disk.load(&state), Err(StateError::Malformed(_))));
    state[0] ^= 1;
    let error = rig.disk.load(&state).unwrap_err().to_string();
    assert!(error.contains("both sides must open the same image"), "{error}");
}

#[test]
fn an_image_that_is_none_is_refused() {
    let refused = |path: &str| Disk::open(Path::new(path)).unwrap_err().to_string();
    assert!(refused("/nonexistent").contains("cannot be opened"));
    assert!(refused("/dev/null").contains("truncate -s"));
}

#[test]
fn what_the_guest_writes_while_the_disk_moves_is_in_the_next_round() {
    let rig = Rig::new("marked");
    assert!(rig.disk.round().is_none(), "nothing is marked before");
    rig.disk.track(ByteCount(64 << 10));
    let mut first = rig.disk.round().unwrap();
    while first.next().unwrap().is_some() {}
    drop(first);
    // A write, a read, one beyond the end.
    rig.put(DATA, &[9; 4096]);
    assert_eq!(rig.request(0, 1, 300), 0);
    assert_eq!(rig.request(1, 0, 900), 0);
    assert_eq!(rig.request(2, 1, u64::MAX), 1);
    assert_eq!(rig.disk.dirty(), ByteCount(64 << 10));
    assert_eq!(rig.disk.writes(), Writes { bytes: ByteCount(4096), operations: 1 });
    let mut next = rig.disk.round().unwrap();
    let extent = next.next().unwrap().unwrap();
    assert_eq!((extent.run.start.0, extent.run.count.0), (32, 16));
    let mut bytes = vec![0; 16 << 12];
    next.submit(extent.run).unwrap();
    next.complete(&mut bytes).unwrap();
    // Sector 300 lies at byte 22528 of that block.
    assert_eq!((bytes[22_527], bytes[22_528], bytes[22_528 + 4096]), (7, 9, 7));
    assert!(next.next().unwrap().is_none());
    rig.disk.untrack();
    assert!(rig.disk.round().is_none());
}
