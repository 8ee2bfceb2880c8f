//! What goes between host and device, counted.

use std::ops::Sub;
use std::sync::atomic::{AtomicU64, Ordering};

/// What went between host and device since the backend was made. A difference of two is what lies between them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Copies from the host to the device.
    pub uploads: u64,
    /// Their bytes.
    pub upload_bytes: u64,
    /// Copies from the device to the host.
    pub downloads: u64,
    /// Their bytes.
    pub download_bytes: u64,
    /// How often the host waited for the device: once for each [`Backend::download`](crate::Backend::download) and
    /// [`Backend::finish_download`](crate::Backend::finish_download).
    pub waits: u64,
    /// Writes through a handle that another one shared, each of which copied the whole buffer first.
    pub copies_on_write: u64,
}

impl Sub for Traffic {
    type Output = Self;

    /// What came after `earlier`.
    fn sub(self, earlier: Self) -> Self {
        Self {
            uploads: self.uploads - earlier.uploads,
            upload_bytes: self.upload_bytes - earlier.upload_bytes,
            downloads: self.downloads - earlier.downloads,
            download_bytes: self.download_bytes - earlier.download_bytes,
            waits: self.waits - earlier.waits,
            copies_on_write: self.copies_on_write - earlier.copies_on_write,
        }
    }
}

/// Counts [`Traffic`], from any thread.
#[derive(Debug, Default)]
pub struct TrafficCounter {
    uploads: AtomicU64,
    upload_bytes: AtomicU64,
    downloads: AtomicU64,
    download_bytes: AtomicU64,
    waits: AtomicU64,
    copies_on_write: AtomicU64,
}

impl TrafficCounter {
    /// A copy of so many bytes to the device.
    pub fn upload(&self, bytes: usize) {
        self.uploads.fetch_add(1, Ordering::Relaxed);
        self.upload_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// A copy of so many bytes to the host.
    pub fn download(&self, bytes: usize) {
        self.downloads.fetch_add(1, Ordering::Relaxed);
        self.download_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The host waited for the device.
    pub fn wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    /// A buffer was copied for a write.
    pub fn copy_on_write(&self) {
        self.copies_on_write.fetch_add(1, Ordering::Relaxed);
    }

    /// All of it so far.
    pub fn so_far(&self) -> Traffic {
        let [uploads, upload_bytes, downloads, download_bytes, waits, copies_on_write] = [
            &self.uploads,
            &self.upload_bytes,
            &self.downloads,
            &self.download_bytes,
            &self.waits,
            &self.copies_on_write,
        ]
        .map(|count| count.load(Ordering::Relaxed));
        Traffic { uploads, upload_bytes, downloads, download_bytes, waits, copies_on_write }
    }
}
