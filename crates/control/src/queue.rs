use crate::locked;
use crate::message::Frame;
use std::collections::VecDeque;
use std::sync::Mutex;
use tokio::sync::Notify;

/// The queue of outgoing frames of a connection. Any thread may add frames without blocking. The queue has no size limit, so that no rank
/// waits for another rank that does not read.
pub struct Queue<M> {
    waiting: Mutex<Waiting<M>>,
    /// Wakes the single reading task.
    ready: Notify,
}

struct Waiting<M> {
    urgent: VecDeque<Frame<M>>,
    ordered: VecDeque<Frame<M>>,
    is_closed: bool,
}

impl<M> Queue<M> {
    /// An empty queue.
    pub fn new() -> Self {
        let waiting = Waiting { urgent: VecDeque::new(), ordered: VecDeque::new(), is_closed: false };
        Self { waiting: Mutex::new(waiting), ready: Notify::new() }
    }

    /// Adds a frame at the end of the queue.
    pub fn push(&self, frame: impl Into<Frame<M>>) {
        self.change(|waiting| waiting.ordered.push_back(frame.into()));
    }

    /// Adds several frames at the end of the queue, without other frames between them.
    pub fn extend(&self, frames: impl Iterator<Item = Frame<M>>) {
        self.change(|waiting| waiting.ordered.extend(frames));
    }

    /// Adds an urgent message ahead of all ordinary frames.
    pub fn push_urgent(&self, message: M) {
        self.change(|waiting| waiting.urgent.push_back(message.into()));
    }

    /// Replaces all ordinary frames in the queue with a last message, and closes the queue.
    pub fn finish(&self, message: M) {
        self.change(|waiting| {
            waiting.ordered.clear();
            waiting.urgent.push_back(message.into());
            waiting.is_closed = true;
        });
    }

    /// Replaces all ordinary frames in the queue with a message.
    pub fn interrupt(&self, message: M) {
        self.change(|waiting| {
            waiting.ordered.clear();
            waiting.urgent.push_back(message.into());
        });
    }

    /// Waits for the next frame; returns `None` after the queue is closed and empty. Cancel-safe.
    pub async fn next(&self) -> Option<Frame<M>> {
        loop {
            if let Some(next) = self.take() {
                return next;
            }
            self.ready.notified().await;
        }
    }

    /// The next frame. The result is `Some(None)` if the queue is closed and empty, and `None` if there is no frame yet.
    pub fn take(&self) -> Option<Option<Frame<M>>> {
        let mut waiting = locked(&self.waiting);
        let next = waiting.urgent.pop_front().or_else(|| waiting.ordered.pop_front());
        match next {
            None if !waiting.is_closed => None,
            next => Some(next),
        }
    }

    fn change(&self, change: impl FnOnce(&mut Waiting<M>)) {
        let mut waiting = locked(&self.waiting);
        if !waiting.is_closed {
            change(&mut waiting);
        }
        drop(waiting);
        self.ready.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drained(queue: &Queue<u8>) -> Vec<u8> {
        std::iter::from_fn(|| queue.take().flatten()).map(|frame| frame.message).collect()
    }

    #[test]
    fn what_is_urgent_comes_first_and_a_closed_queue_takes_nothing() {
        let queue = Queue::new();
        queue.push(1);
        queue.push_urgent(2);
        queue.push(3);
        assert_eq!(drained(&queue), [2, 1, 3]);
        assert!(queue.take().is_none());
        queue.push(4);
        queue.interrupt(5);
        queue.push(6);
        assert_eq!(drained(&queue), [5, 6]);
        queue.push(7);
        queue.finish(8);
        queue.push(9);
        assert_eq!(drained(&queue), [8]);
        assert!(matches!(queue.take(), Some(None)));
    }
}
