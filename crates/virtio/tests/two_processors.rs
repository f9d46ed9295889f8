//! A driver that adds requests while the device takes some, each on a processor of its own.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, Ordering};

use godwit_virtio::Transport;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const TABLE: u64 = 0x1000;
const DRIVER: u64 = 0x2000;
const DEVICE: u64 = 0x3000;
const PLACES: u16 = 16;
const REQUESTS: u16 = 50_000;

fn word(memory: &GuestMemoryMmap, at: u64) -> u16 {
    memory.load(GuestAddress(at), Ordering::Acquire).unwrap()
}

#[test]
fn a_request_that_comes_while_the_device_looks_breaks_nothing() {
    // Mutation: the driver's index is read again when the queue was found empty, and must be the
    // same.
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    let mut transport = Transport::new(2, 0, 1);
    for (register, value) in [(0x70, 3), (0x24, 1), (0x20, 1), (0x70, 11), (0x38, PLACES.into())] {
        transport.write(register, value);
    }
    for (register, address) in [(0x80, TABLE), (0x90, DRIVER), (0xa0, DEVICE)] {
        transport.write(register, address as u32);
    }
    transport.write(0x44, 1);
    transport.write(0x70, 15);
    // One descriptor of four bytes, which all requests are.
    memory.write_obj(0x8000_u64, GuestAddress(TABLE)).unwrap();
    memory.write_obj(4_u32, GuestAddress(TABLE + 8)).unwrap();

    let (mut taken, broken) = (0_u32, AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1..=REQUESTS {
                while number.wrapping_sub(word(&memory, DEVICE + 2)) > PLACES
                    && !broken.load(Ordering::Relaxed)
                {
                    std::hint::spin_loop();
                }
                let index = GuestAddress(DRIVER + 2);
                memory.store(number, index, Ordering::Release).unwrap();
            }
        });
        while taken < REQUESTS.into() && transport.works() {
            transport.work(0, &memory, |pieces| {
                assert_eq!((pieces.len(), pieces[0].len), (1, 4));
                taken += 1;
                Ok(0)
            });
        }
        // The driver need not wait for a device that is.
        broken.store(!transport.works(), Ordering::Relaxed);
    });
    assert_eq!((taken, transport.works()), (REQUESTS.into(), true));
}
