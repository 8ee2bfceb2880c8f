use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Memory of a device that belongs to somebody else, such as a tensor of another library in this process. A backend's buffer may refer to
/// it: `Cpu::borrow` and `Cuda::borrow`. The owner is dropped with the last buffer that refers to the memory.
#[derive(Clone)]
pub struct Lent {
    address: u64,
    bytes: usize,
    is_writable: bool,
    /// Keeps the memory alive.
    owner: Arc<dyn Any + Send + Sync>,
}

impl Lent {
    /// Memory that is only read. An operation that writes to a buffer of such memory first copies the bytes, as it does for bytes that
    /// buffers share.
    ///
    /// # Safety
    /// `address` is that of `bytes` readable bytes on the device of the backend that will borrow them, until `owner` is dropped. Nobody
    /// writes to them while work that reads them runs. On a GPU, the owner's drop leaves the memory untouched until the work that was
    /// issued before on the backend's stream has ended.
    pub unsafe fn new(address: u64, bytes: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { address, bytes, is_writable: false, owner }
    }

    /// Memory that operations write to in place.
    ///
    /// # Safety
    /// As for [`Lent::new`]. The bytes are writable, and nobody else reads or writes them while work on them runs.
    pub unsafe fn writable(address: u64, bytes: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { address, bytes, is_writable: true, owner }
    }

    /// The address of the first byte, on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether operations write to the memory in place.
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// The number of values of type `T`.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if the bytes are not a whole number of such values, or do not begin at a multiple of their alignment.
    pub fn len_of<T>(&self) -> crate::Result<usize> {
        let (each, align) = (size_of::<T>(), align_of::<T>() as u64);
        if !self.bytes.is_multiple_of(each) {
            return Err(crate::Error::shape("borrow", "bytes", self.bytes, format!("a multiple of {each}")));
        }
        if !self.address.is_multiple_of(align) {
            let got = format!("{:#x}", self.address);
            return Err(crate::Error::shape("borrow", "address", got, format!("a multiple of {align}")));
        }
        Ok(self.bytes / each)
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, bytes, is_writable, owner } = self;
        let owners = Arc::strong_count(owner);
        write!(f, "Lent({bytes} bytes at {address:#x}, writable: {is_writable}, {owners} handles)")
    }
}
