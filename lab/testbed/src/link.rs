//! A link between source and destination that can be cut: a TCP relay in between.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;

/// A relay to a destination; connections through it live until it is cut, and can be made again
/// when it is mended.
#[derive(Debug)]
pub struct Link {
    address: String,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    is_cut: Arc<AtomicBool>,
}

impl Link {
    /// Relays to `destination` from a new address.
    ///
    /// # Errors
    /// When no address can be had.
    pub fn to(destination: &str) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("cannot listen")?;
        let address = listener.local_addr()?.to_string();
        let (streams, is_cut) =
            (Arc::<Mutex<Vec<TcpStream>>>::default(), Arc::<AtomicBool>::default());
        let (all, cut, destination) =
            (Arc::clone(&streams), Arc::clone(&is_cut), destination.to_owned());
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                if cut.load(Ordering::Relaxed) {
                    continue;
                }
                let Ok(far) = TcpStream::connect(&destination) else { continue };
                relay(&near, &far);
                relay(&far, &near);
                all.lock().unwrap_or_else(PoisonError::into_inner).extend([near, far]);
            }
        });
        Ok(Self { address, streams, is_cut })
    }

    /// Where to connect to.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Breaks all connections, and whatever is tried anew.
    pub fn cut(&self) {
        self.is_cut.store(true, Ordering::Relaxed);
        for stream in self.streams.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Takes connections again.
    pub fn mend(&self) {
        self.is_cut.store(false, Ordering::Relaxed);
    }
}

fn relay(from: &TcpStream, to: &TcpStream) {
    let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) else { return };
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
}
