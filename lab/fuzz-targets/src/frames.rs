//! What a peer sends: greetings, frames, messages, pages.

use godwit_codec::{CodecId, Decompressor};
use godwit_wire::{
    FRAME_PAGES, FrameHeader, FrameKind, GREETING_LEN, Greeting, HEADER_LEN, Message,
    PAYLOAD_LIMIT, PageFrame, barrier_aux, barrier_of, seal,
};

const PAGE: usize = 4096;

/// A greeting. One that is understood says what it says.
pub(crate) fn greeting(bytes: &[u8]) {
    let mut greeting = [0; GREETING_LEN];
    let length = bytes.len().min(GREETING_LEN);
    greeting[..length].copy_from_slice(&bytes[..length]);
    match Greeting::decode(&greeting) {
        Ok(understood) => {
            assert_eq!(Greeting::decode(&understood.encode()), Ok(understood));
        }
        Err(error) => assert!(!error.to_string().contains(char::is_control)),
    }
}

/// Frames one behind the other, each with its header; the checksum is made to fit, or nothing
/// behind it would ever be seen.
pub(crate) fn frames(mut bytes: &[u8]) {
    let mut decompressor = Decompressor::new();
    while let Some((header, rest)) = bytes.split_first_chunk::<HEADER_LEN>() {
        let decoded = FrameHeader::decode(header);
        let Ok(said) = decoded else { return };
        assert!(said.length <= PAYLOAD_LIMIT);
        let length = said.length.min(rest.len());
        let (payload, behind) = rest.split_at(length);
        bytes = behind;
        let _ = said.verify(payload);
        let mut frame = vec![0; HEADER_LEN];
        frame.extend(payload);
        seal(&mut frame, said.kind, said.runs, said.aux);
        one(&frame, &mut decompressor);
    }
}

fn one(frame: &[u8], decompressor: &mut Decompressor) {
    let Some((header, payload)) = frame.split_first_chunk() else { return };
    let Ok(header) = FrameHeader::decode(header) else { return };
    assert_eq!(header.verify(payload), Ok(()));
    match header.kind {
        FrameKind::Pages => pages(&header, payload, decompressor),
        FrameKind::Barrier => {
            if let Ok((round, last)) = barrier_of(header.aux) {
                assert_eq!(barrier_aux(round, last), header.aux);
            }
        }
        _ => message(&header, payload),
    }
}

/// What is understood can be sent on, and is the same there.
fn message(header: &FrameHeader, payload: &[u8]) {
    let understood = match Message::decode(header, payload) {
        Ok(understood) => understood,
        Err(error) => return drop(error.to_string()),
    };
    let frame = understood.encode();
    assert!(frame.len() <= HEADER_LEN + PAYLOAD_LIMIT);
    let again = frame.split_first_chunk().map(|(header, payload)| {
        FrameHeader::decode(header).and_then(|header| Message::decode(&header, payload))
    });
    assert_eq!(again, Some(Ok(understood)));
}

fn pages(header: &FrameHeader, payload: &[u8], decompressor: &mut Decompressor) {
    let Ok(frame) = PageFrame::decode(header, payload) else { return };
    assert!(frame.raw_len <= FRAME_PAGES * PAGE);
    let _ = frame.first_page().to_string();
    let mut raw = vec![0; frame.raw_len];
    if frame.codec == 0 {
        raw.copy_from_slice(frame.data);
    } else {
        let Ok(codec) = CodecId::from_wire(frame.codec) else { return };
        if decompressor.decompress(codec, frame.data, &mut raw).is_err() {
            return;
        }
    }
    let mut taken = 0;
    for (run, bytes) in frame.runs(&raw) {
        assert!(run.run.count.0 > 0 && run.run.start.0.checked_add(run.run.count.0).is_some());
        taken += bytes.len();
    }
    assert_eq!(taken, raw.len());
}
