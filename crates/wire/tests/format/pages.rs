//! Frames of pages.

use godwit_units::PageRun;
use godwit_wire::*;

use super::pages_frame;

#[test]
fn page_frames_come_back_as_they_went() {
    let frame = pages_frame();
    let (header, payload) = frame.split_first_chunk().unwrap();
    let header = FrameHeader::decode(header).unwrap();
    header.verify(payload).unwrap();
    let pages = PageFrame::decode(&header, payload).unwrap();
    let runs: Vec<_> =
        pages.runs(pages.data).map(|(run, bytes)| (run.run, run.content, bytes.to_vec())).collect();
    assert_eq!(pages.block, 7);
    assert_eq!(
        runs,
        [
            (PageRun::new(10, 1), Content::Data, vec![1; 4096]),
            (PageRun::new(11, 1), Content::Zero, vec![]),
            (PageRun::new(13, 1), Content::Data, vec![3; 4096]),
        ]
    );
}

#[test]
fn compressed_frames_keep_their_table_in_the_clear() {
    let mut builder = PageFrameBuilder::new();
    builder
        .add(
            PageRun::new(10, 2),
            |bytes| {
                bytes.fill(5);
                Ok::<(), ()>(())
            },
            |_, _| Some(Content::Data),
        )
        .unwrap();
    builder.zero(PageRun::new(40, 9));
    assert_eq!(builder.data(), [5; 8192]);
    let mut other = vec![0xee; HEADER_LEN + 3 + RUNS_LIMIT * RUN_LEN];
    let frame = builder.finish_in(&mut other, 3, 7, 2).to_vec();
    assert!(builder.is_empty());
    let (header, payload) = frame.split_first_chunk().unwrap();
    let header = FrameHeader::decode(header).unwrap();
    header.verify(payload).unwrap();
    let pages = PageFrame::decode(&header, payload).unwrap();
    assert_eq!(
        (pages.block, pages.codec, pages.data, pages.raw_len),
        (7, 2, [0xee; 3].as_slice(), 8192)
    );
    let raw = [5; 8192];
    let runs: Vec<_> = pages.runs(&raw).map(|(run, bytes)| (run.run, bytes.len())).collect();
    assert_eq!(runs, [(PageRun::new(10, 2), 8192), (PageRun::new(40, 9), 0)]);
}

#[test]
fn a_page_frame_cannot_announce_more_pages_than_fit() {
    let mut builder = PageFrameBuilder::new();
    builder.add(PageRun::new(0, 1), |_| Ok::<(), ()>(()), |_, _| Some(Content::Zero)).unwrap();
    let mut frame = builder.finish(0).to_vec();
    // One page of zeros; now with a codec, and as 257 pages of data.
    frame[24 + 8..24 + 16].copy_from_slice(&[1, 1, 0, 0, 0, 0, 0, 0]);
    seal(&mut frame, FrameKind::Pages, 1, 1 << 32);
    let (header, payload) = frame.split_first_chunk().unwrap();
    let header = FrameHeader::decode(header).unwrap();
    let error = PageFrame::decode(&header, payload).unwrap_err();
    assert!(matches!(error, WireError::Field { field: "pages", value: 257, .. }), "{error}");
}

#[test]
fn a_page_frame_whose_table_lies_is_refused() {
    let good = pages_frame();
    for (at, value) in [(24 + 8192 + 8, 2), (24 + 8192 + 12, 9), (24 + 8192 + 16 + 8, 0)] {
        let mut frame = good.clone();
        frame[at] = value;
        seal(&mut frame, FrameKind::Pages, 3, 7);
        let (header, payload) = frame.split_first_chunk().unwrap();
        let header = FrameHeader::decode(header).unwrap();
        header.verify(payload).unwrap();
        assert!(PageFrame::decode(&header, payload).is_err(), "byte {at} = {value}");
    }
}

#[test]
fn the_pages_of_a_frame_begin_at_a_page() {
    let mut builder = PageFrameBuilder::new();
    for page in [3, 9] {
        let read = |bytes: &mut [u8]| match bytes.as_ptr().addr() % 4096 {
            0 => Ok(()),
            other => Err(other),
        };
        builder.add(PageRun::new(page, 1), read, |_, _| Some(Content::Data)).unwrap();
    }
}

#[test]
fn a_failed_read_leaves_the_frame_as_it_was() {
    let mut builder = PageFrameBuilder::new();
    builder.zero(PageRun::new(0, 5));
    let room = builder.room();
    assert_eq!(
        builder.add(PageRun::new(9, 2), |_| Err("gone"), |_, _| Some(Content::Data)),
        Err("gone")
    );
    assert_eq!(builder.room(), room);
}

#[test]
fn a_frame_is_full_of_pages_or_full_of_runs() {
    let mut builder = PageFrameBuilder::new();
    assert_eq!(builder.room(), FRAME_PAGES.min(RUNS_LIMIT));
    let data = |_: &mut [u8]| Ok::<(), ()>(());
    for left in (0..FRAME_PAGES).rev() {
        builder.add(PageRun::new(left as u64 * 2, 1), data, |_, _| Some(Content::Data)).unwrap();
        assert_eq!(builder.room(), left.min(RUNS_LIMIT - (FRAME_PAGES - left)));
    }
    assert!(!builder.is_empty());
    let frame = builder.finish(0).to_vec();
    assert!(builder.is_empty());
    let (header, payload) = frame.split_first_chunk().unwrap();
    let header = FrameHeader::decode(header).unwrap();
    assert_eq!(usize::from(header.runs), FRAME_PAGES);
    let pages = PageFrame::decode(&header, payload).unwrap();
    assert_eq!(pages.raw_len, FRAME_PAGES * 4096);
    assert_eq!(pages.first_page().0, (FRAME_PAGES as u64 - 1) * 2);

    for left in (0..RUNS_LIMIT).rev() {
        builder.zero(PageRun::new(left as u64 * 2, 1));
        assert_eq!(builder.room(), FRAME_PAGES.min(left));
    }
}
