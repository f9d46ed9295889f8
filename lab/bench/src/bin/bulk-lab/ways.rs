//! The ways to send pages out of one RAM file, and to receive them into another.
//!
//! As in a migration, each frame is a header of 24 bytes and then whole pages, from the same place
//! of one file to the same place of the other.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use godwit_bench::sys::{self, Mapping};

const HEADER: usize = 24;

/// How pages leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Send {
    /// pread(2) into a buffer, write(2) from it.
    Buffer,
    /// sendmsg(2) from a mapping of the file.
    Mapping,
    /// sendfile(2).
    Sendfile,
    /// sendmsg(2) from a mapping with MSG_ZEROCOPY.
    Zerocopy,
    /// splice(2): file, pipe, socket.
    Splice,
}

/// How pages arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receive {
    /// recv(2) into a mapping: the copy faults each page in.
    Mapping,
    /// MADV_POPULATE_WRITE for the frame, then recv(2) into it.
    Populate,
    /// Another thread populates ahead.
    Ahead,
    /// recv(2) into a mapping with MADV_HUGEPAGE, which the file system must allow (huge=advise).
    Huge,
    /// recv(2) into a buffer, pwrite(2) of whole pages.
    Buffer,
    /// splice(2): socket, pipe, file.
    Splice,
}

pub(crate) const SENDS: [(&str, Send); 5] = [
    ("buffer", Send::Buffer),
    ("mapping", Send::Mapping),
    ("sendfile", Send::Sendfile),
    ("zerocopy", Send::Zerocopy),
    ("splice", Send::Splice),
];
pub(crate) const RECEIVES: [(&str, Receive); 6] = [
    ("mapping", Receive::Mapping),
    ("populate", Receive::Populate),
    ("ahead", Receive::Ahead),
    ("huge", Receive::Huge),
    ("buffer", Receive::Buffer),
    ("splice", Receive::Splice),
];

/// Sends the frames that start at `frames`, each of `len` bytes.
pub(crate) fn send(
    way: Send,
    mut socket: &TcpStream,
    file: &File,
    map: &Mapping,
    frames: &[usize],
    len: usize,
) -> io::Result<()> {
    let header = [0; HEADER];
    let mut buffer = vec![0; HEADER + if way == Send::Buffer { len } else { 0 }];
    let pipe = sys::pipe(len)?;
    if way == Send::Zerocopy {
        sys::option(socket.as_fd(), libc::SO_ZEROCOPY, 1)?;
    }
    let mut open_sends = 0_u32;
    for at in frames.iter().copied() {
        match way {
            Send::Buffer => {
                file.read_exact_at(&mut buffer[HEADER..], at as u64)?;
                socket.write_all(&buffer)?;
            }
            Send::Mapping | Send::Zerocopy => {
                let flags = if way == Send::Zerocopy { libc::MSG_ZEROCOPY } else { 0 };
                let mut done = 0;
                while done < HEADER + len {
                    let (head, body) = (&header[done.min(HEADER)..], done.saturating_sub(HEADER));
                    match map.send(socket.as_fd(), head, at + body, len - body, flags) {
                        Ok(sent) => {
                            done += sent;
                            open_sends += u32::from(way == Send::Zerocopy);
                        }
                        // Too many notes wait to be taken (optmem_max).
                        Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
                        Err(error) => return Err(error),
                    }
                    if way == Send::Zerocopy {
                        open_sends -= sys::finished_sends(socket.as_fd())?.0;
                    }
                }
            }
            Send::Sendfile => {
                rustix::net::send(socket, &header, rustix::net::SendFlags::MORE)?;
                let mut done = 0;
                while done < len {
                    done += sys::sendfile(socket.as_fd(), file, (at + done) as u64, len - done)?;
                }
            }
            Send::Splice => {
                rustix::net::send(socket, &header, rustix::net::SendFlags::MORE)?;
                let mut done = 0;
                while done < len {
                    let mut piped = sys::splice(
                        file,
                        &pipe.1,
                        None,
                        Some((at + done) as u64),
                        len - done,
                        false,
                    )?;
                    while piped > 0 {
                        let moved =
                            sys::splice(&pipe.0, socket, None, None, piped, done + piped < len)?;
                        done += moved;
                        piped -= moved;
                    }
                }
            }
        }
    }
    while open_sends > 0 {
        open_sends -= sys::finished_sends(socket.as_fd())?.0;
        std::thread::yield_now();
    }
    Ok(())
}

/// Receives what [`send`] sends.
pub(crate) fn receive(
    way: Receive,
    mut socket: &TcpStream,
    file: &File,
    map: &Mapping,
    frames: &[usize],
    len: usize,
    ahead: &AtomicUsize,
) -> io::Result<()> {
    let mut header = [0; HEADER];
    let mut buffer = vec![0; if way == Receive::Buffer { len } else { 0 }];
    let pipe = sys::pipe(len)?;
    for (number, at) in frames.iter().copied().enumerate() {
        socket.read_exact(&mut header)?;
        match way {
            Receive::Mapping | Receive::Populate | Receive::Ahead | Receive::Huge => {
                if way == Receive::Populate {
                    map.advise(at, len, libc::MADV_POPULATE_WRITE)?;
                }
                ahead.store(number + 1, Ordering::Relaxed);
                let mut done = 0;
                while done < len {
                    match map.receive(socket.as_fd(), at + done, len - done)? {
                        0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                        bytes => done += bytes,
                    }
                }
            }
            Receive::Buffer => {
                socket.read_exact(&mut buffer)?;
                file.write_all_at(&buffer, at as u64)?;
            }
            Receive::Splice => {
                let mut done = 0;
                while done < len {
                    let mut piped = sys::splice(socket, &pipe.1, None, None, len - done, true)?;
                    if piped == 0 {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    while piped > 0 {
                        let moved = sys::splice(
                            &pipe.0,
                            file,
                            Some((at + done) as u64),
                            None,
                            piped,
                            false,
                        )?;
                        done += moved;
                        piped -= moved;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Populates the places of frames, at most 32 MiB before the receiver, which notes in `received`
/// how far it is.
pub(crate) fn populate_ahead(
    map: &Mapping,
    frames: &[usize],
    len: usize,
    received: &AtomicUsize,
) -> io::Result<()> {
    for (number, at) in frames.iter().copied().enumerate() {
        while number > received.load(Ordering::Relaxed) + (32 << 20) / len {
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
        map.advise(at, len, libc::MADV_POPULATE_WRITE)?;
    }
    Ok(())
}
