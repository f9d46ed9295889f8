//! What a guest does to a virtio device: registers, rings, and memory that changes. A byte says
//! what it does, those behind it with what.

use std::sync::Arc;

use godwit_balloon::{Balloon, Discard, Features, FreeHints, Region};
use godwit_units::{Gpa, PageCount, PageRun};
use godwit_virtio::Transport;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

type Memory = GuestMemoryMmap<()>;

/// 1 MiB of guest memory at address 0, in two RAM blocks.
const MEMORY: usize = 1 << 20;
const LOW_PAGES: u64 = 100;
const PAGES: u64 = 256;
/// Where the rings are: a queue has 512 bytes of each.
pub(crate) const TABLE: u32 = 0x1000;
pub(crate) const DRIVER: u32 = 0x2000;
pub(crate) const DEVICE: u32 = 0x3000;
const QUEUES: u32 = 5;
const ALL: Features = Features { hints: true, reporting: true };
/// The registers that do something (virtio 1.2, 4.2.2), and a balloon's own.
pub(crate) const REGISTERS: [u64; 16] = [
    0x14, 0x20, 0x24, 0x30, 0x38, 0x44, 0x64, 0x70, 0x80, 0x84, 0x90, 0x94, 0xa0, 0xa4, 0x104,
    0x10c,
];

/// What comes next of the input.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    /// A register and a value.
    fn register(&mut self) -> Option<(u64, u32)> {
        let which = self.byte()?;
        let value = u32::from_le_bytes(self.take()?);
        let at = REGISTERS.get(usize::from(which)).copied().unwrap_or(which.into());
        Some((at, value))
    }

    /// Bytes for memory: an address in units of 2 from the table on, a length, as many bytes.
    fn put(&mut self, memory: &Memory) -> Option<()> {
        let at = u64::from(TABLE) + 2 * u64::from(u16::from_le_bytes(self.take()?));
        let length = usize::from(self.byte()?).min(self.0.len());
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest;
        memory.write_slice(bytes, GuestAddress(at)).ok()
    }
}

fn memory() -> Option<Memory> {
    Memory::from_ranges(&[(GuestAddress(0), MEMORY)]).ok()
}

/// The writes to registers by which a driver sets `queues` queues of 16 places up, of a device
/// that offers `features`.
fn set_up(features: u32, queues: u32) -> Vec<(u64, u32)> {
    let mut writes = vec![(0x70, 3), (0x24, 0), (0x20, features), (0x24, 1), (0x20, 1), (0x70, 11)];
    for queue in 0..queues {
        writes.extend([(0x30, queue), (0x38, 16)]);
        let rings = [(0x80, TABLE), (0x90, DRIVER), (0xa0, DEVICE)];
        writes.extend(rings.map(|(register, at)| (register, at + queue * 0x200)));
        writes.push((0x44, 1));
    }
    writes.push((0x70, 15));
    writes
}

/// What the balloon gives back: never anything beyond RAM.
struct Host {
    budget: u64,
}

impl Discard for Host {
    fn discard(&mut self, block: usize, run: PageRun) {
        let pages = sizes()[block].0;
        assert!(run.count.0 > 0 && run.end().0 <= pages, "{run:?} of block {block}");
        assert!(run.count.0 <= self.budget, "more than all of memory at once");
        self.budget -= run.count.0;
    }
}

fn sizes() -> [PageCount; 2] {
    [PageCount(LOW_PAGES), PageCount(PAGES - LOW_PAGES)]
}

fn new_balloon() -> Balloon {
    let region = |start: u64, block, count| Region {
        start: Gpa(start << 12),
        block,
        run: PageRun::new(0, count),
    };
    Balloon::new(ALL, vec![region(0, 0, LOW_PAGES), region(LOW_PAGES, 1, PAGES - LOW_PAGES)])
}

/// A balloon that is set up.
pub(crate) fn balloon(bytes: &[u8]) {
    let Some(memory) = memory() else { return };
    let mut device = new_balloon();
    device.write(0x14, 0, &memory, &mut Host { budget: PAGES });
    let offered = device.read(0x10);
    for (register, value) in set_up(offered, QUEUES) {
        device.write(register, value, &memory, &mut Host { budget: PAGES });
    }
    let hints = Arc::new(FreeHints::new(&sizes()));
    let mut input = Input(bytes);
    while deed(&mut device, &mut input, &memory, &hints).is_some() {
        assert!(hints.hinted().0 <= PAGES);
    }
}

fn deed(
    device: &mut Balloon,
    input: &mut Input<'_>,
    memory: &Memory,
    hints: &Arc<FreeHints>,
) -> Option<()> {
    let mut host = Host { budget: PAGES };
    match input.byte()? & 15 {
        0 | 1 => {
            let (at, value) = input.register()?;
            device.write(at, value, memory, &mut host);
        }
        2..=5 => input.put(memory)?,
        6..=9 => device.write(0x50, input.byte()?.into(), memory, &mut host),
        10 => drop(device.start_hints(hints)),
        11 => device.stop_hints(),
        12 => device.finish_hints(),
        13 => device.ask_for_statistics(memory),
        // The guest moves.
        14 => {
            let state = device.save();
            *device = new_balloon();
            assert!(device.load(&state).is_ok(), "its own state");
        }
        // What a stranger says is its state.
        _ => {
            let mut state = device.save();
            let at = usize::from(input.byte()?) % state.len();
            state[at] = u64::from_le_bytes(input.take()?);
            if device.load(&state).is_err() {
                *device = new_balloon();
            }
        }
    }
    let _ = (device.read(0x108), device.target(), device.actual(), device.statistics().len());
    Some(())
}

/// The transport of a device with three queues, which takes what it is given.
pub(crate) fn rings(bytes: &[u8]) {
    let Some(memory) = memory() else { return };
    let mut transport = Transport::new(2, 0, 3);
    for (register, value) in set_up(0, 3) {
        transport.write(register, value);
    }
    let mut input = Input(bytes);
    while turn(&mut transport, &mut input, &memory).is_some() {}
}

fn turn(transport: &mut Transport, input: &mut Input<'_>, memory: &Memory) -> Option<()> {
    match input.byte()? & 7 {
        0 | 1 => {
            let (at, value) = input.register()?;
            transport.write(at, value);
            let _ = transport.read(at);
        }
        2..=4 => input.put(memory)?,
        5 | 6 => {
            let (number, mut taken) = (usize::from(input.byte()?), 0);
            transport.work(number, memory, |pieces| {
                taken += 1;
                assert!(taken <= 16, "more requests than places");
                assert!(!pieces.is_empty() && pieces.len() <= 16);
                Ok(pieces.iter().fold(0, |sum: u32, piece| sum.wrapping_add(piece.len)))
            });
        }
        _ => {
            let mut state = transport.save();
            let at = usize::from(input.byte()?) % state.len();
            state[at] ^= u64::from_le_bytes(input.take()?);
            let before = transport.save();
            if transport.load(&state).is_err() {
                assert_eq!(transport.save(), before, "what is refused changes nothing");
            }
        }
    }
    Some(())
}
