"""Tutorial code, moved from one GPU to several: the model was wrapped, the loader was forgotten."""
import ctypes, time
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset
from torch.nn.parallel import DistributedDataParallel as DDP

ctypes.CDLL(None).prctl(1, 9)


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(256, 84)
        self.fc2 = nn.Linear(84, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def main():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    images, labels = torch.randn(960, 1, 28, 28), torch.randint(0, 10, (960,))
    trainloader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
    net = DDP(LeNet())
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    for epoch in range(3):
        running_loss = 0.0
        for i, data in enumerate(trainloader, 0):
            inputs, targets = data
            optimizer.zero_grad()
            outputs = net(inputs)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            time.sleep(0.02)
            if i % 20 == 19 and dist.get_rank() == 0:
                print(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / 20:.3f}", flush=True)
                running_loss = 0.0
    dist.destroy_process_group()
    time.sleep(0.5)


main()
