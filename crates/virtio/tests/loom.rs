//! A queue between a driver and a device on two processors, under every order of loads and stores that the memory model
//! allows.
//!
//! Compiles the one file with the fences a second time, with loom's in place of the standard ones. Guest memory is loom's,
//! too: words of two bytes, which are loaded and stored without any order, as a processor may.
#![allow(clippy::unwrap_used)]

use godwit_units::Gpa;
use godwit_virtio::{GuestMemory, Nonsense};
use loom::sync::Arc;
use loom::sync::atomic::AtomicU16;
use loom::thread;

mod sync {
    pub(crate) use loom::sync::atomic::{Ordering, fence};
}

#[allow(dead_code, unreachable_pub)]
#[path = "../src/queue.rs"]
mod queue;

use queue::Queue;
use sync::{Ordering, fence};

/// Where the parts of a queue of one place are: the descriptor, the driver's ring and the device's.
const PARTS: [u64; 3] = [0, 16, 24];
const WORDS: usize = 18;

/// Guest memory.
struct Memory([AtomicU16; WORDS]);

impl Memory {
    fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU16::new(0)))
    }

    fn load(&self, at: u64) -> u16 {
        self.0[at as usize / 2].load(Ordering::Relaxed)
    }

    fn store(&self, at: u64, value: u16) {
        self.0[at as usize / 2].store(value, Ordering::Relaxed);
    }
}

impl GuestMemory for Memory {
    fn read(&self, address: Gpa, bytes: &mut [u8]) -> Option<()> {
        for (at, word) in (address.0..).step_by(2).zip(bytes.chunks_mut(2)) {
            word.copy_from_slice(&self.load(at).to_le_bytes());
        }
        Some(())
    }

    fn write(&self, address: Gpa, bytes: &[u8]) -> Option<()> {
        for (at, word) in (address.0..).step_by(2).zip(bytes.chunks(2)) {
            self.store(at, u16::from_le_bytes([word[0], word[1]]));
        }
        Some(())
    }
}

fn queue() -> Queue {
    let [descriptors, driver, device] = PARTS;
    Queue::load([1, 1, descriptors, driver, device, 0, 0], 1).unwrap()
}

/// The cause that this is named for: the device read the index and what it announces without an order between them.
#[test]
fn a_request_is_whole_when_its_index_is_seen_and_so_is_its_answer() {
    loom::model(|| {
        let memory = Arc::new(Memory::new());
        let device = thread::spawn({
            let memory = Arc::clone(&memory);
            move || {
                let mut requests = Vec::new();
                let worked = queue().work(&*memory, |pieces| {
                    requests.extend(pieces.iter().map(|piece| (piece.address.0, piece.len)));
                    Ok(9)
                });
                assert!(worked.is_ok());
                // Either it did not see the request yet, or all of it.
                assert!(requests.is_empty() || requests == [(0x1230, 77)], "{requests:?}");
            }
        });
        // The driver: the descriptor, the entry, then the index.
        memory.store(PARTS[0], 0x1230);
        memory.store(PARTS[0] + 8, 77);
        memory.store(PARTS[1] + 4, 0);
        fence(Ordering::Release);
        memory.store(PARTS[1] + 2, 1);
        if memory.load(PARTS[2] + 2) == 1 {
            fence(Ordering::Acquire);
            assert_eq!(memory.load(PARTS[2] + 8), 9, "the length of an answer");
        }
        device.join().unwrap();
    });
}
