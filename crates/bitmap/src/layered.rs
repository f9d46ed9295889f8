pub struct LayeredBitmap;
