pub struct AtomicDirtyBitmap;
